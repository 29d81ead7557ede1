"""Objects in shared memory: one host, several engines, no copy to reach a neighbour's KV.

    ROOT/v1/index/3f7/<key name>  ->  "<segment>.<slot>.<generation>.<bytes>"   a symbolic link
    ROOT/v1/segments/<id>.<slot bytes>                                         see segment.py

A file per object would pay a page fault per 64 KiB at every read, which halves its speed (3.1 instead of 6.2
GB/s where memcpy made 6.8); segments stay mapped. The link is the index entry: it appears at once, it cannot
be overwritten, and its own times carry the stamp.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_deepinfer.store.base import Backend, Blob, Entry, Garbage, Item
from vllm_deepinfer.store.errors import StoreError, StoreFull
from vllm_deepinfer.store.keys import Key
from vllm_deepinfer.store.segment import Segment, segment_bytes, slot_bytes
from vllm_deepinfer.store.stamp import Stamp

DEFAULT_CAPACITY = 1 << 30
_VERSION_FOLDER = "v1"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}

_Place = tuple[Segment, int, int, int]  # segment, slot, generation, bytes


class MemoryBackend(Backend):
    """Shared memory as a store.

    Args:
        root: A folder on tmpfs, made if missing. It outlives the processes; `store rm --all` or a restart of
            the host empties it.
        capacity_bytes: What all segments may take together; every process should give the same.

    Raises:
        StoreError: the folder cannot be made.
    """

    name = "memory"

    def __init__(self, root: Path, capacity_bytes: int = DEFAULT_CAPACITY) -> None:
        self.root, self.capacity_bytes = root, capacity_bytes
        self._index = root / _VERSION_FOLDER / "index"
        self._folder = root / _VERSION_FOLDER / "segments"
        self._prefix = f"{self._index}/"
        self._segments: dict[str, Segment] = {}
        self._mutex = threading.Lock()
        try:
            self._index.mkdir(parents=True, exist_ok=True)
            self._folder.mkdir(exist_ok=True)
            self._lock_file = os.open(
                root / _VERSION_FOLDER / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640
            )
        except OSError as error:
            raise StoreError(f"the store {root} cannot be opened: {error.strerror}") from error

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        return [os.path.lexists(self._path(key)) for key in keys]

    def get(self, key: Key) -> Blob | None:
        place = self._place(_readlink(self._path(key)))
        if place is None:
            return None
        segment, slot, generation, nbytes = place
        if not segment.pin(slot):
            return None
        # Whoever writes to a slot takes it and counts its generation up first, and nobody takes it now: the
        # generation that the link names means that the bytes are the link's, also if it is gone meanwhile.
        if segment.generation(slot) != generation:
            segment.unpin(slot)
            return None
        return _PinnedBlob(segment, slot, nbytes)

    def put(self, item: Item) -> bool:
        path = self._path(item.key)
        if os.path.lexists(path):
            self.touch([item.key], item.stamp, hit=False)
            return False
        nbytes = item.nbytes
        segment, slot = self._allocate(nbytes)
        published = False
        try:
            view, start = segment.view(slot, nbytes), 0
            for part in item.parts:
                size = memoryview(part).nbytes
                view[start : start + size] = memoryview(part).cast("B")
                start += size
            segment.commit(slot, nbytes, item.key.name)
            published = self._publish(
                path, f"{segment.id}.{slot}.{segment.generation(slot)}.{nbytes}", item.stamp
            )
        except OSError as error:
            kind = StoreFull if error.errno in _NO_ROOM else StoreError
            raise kind(f"{self.root}: {error.strerror}") from error
        finally:
            segment.release(slot, free=not published)
        return published

    def _publish(self, path: str, target: str, stamp: Stamp) -> bool:
        temporary = f"{path}.{secrets.token_hex(6)}"
        try:
            os.symlink(target, temporary)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(target, temporary)
        try:
            os.utime(temporary, ns=(stamp.atime_ns, stamp.mtime_ns), follow_symlinks=False)
            os.link(temporary, path, follow_symlinks=False)
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary)
        return True

    def touch(self, keys: Sequence[Key], stamp: Stamp, hit: bool = True) -> None:
        for key in keys:
            path = self._path(key)
            with suppress(OSError):
                found = os.lstat(path)
                new = Stamp.from_times(found.st_mtime_ns, found.st_atime_ns).refreshed(stamp, hit)
                os.utime(path, ns=(new.atime_ns, new.mtime_ns), follow_symlinks=False)

    def delete(self, keys: Sequence[Key]) -> list[bool]:
        return [self._delete(self._path(key)) for key in keys]

    def _delete(self, path: str) -> bool:
        place = self._place(_readlink(path))
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(f"{self.root}: {error.strerror}") from error
        if place is not None:
            segment, slot, generation, _ = place
            segment.retire(slot, generation)
        return True

    def scan(self) -> Iterator[Entry]:
        for folder in self._folders():
            with suppress(FileNotFoundError), os.scandir(folder) as links:
                for link in links:
                    key, target = Key.parse(link.name), _readlink(link.path)
                    if key is None or target is None:
                        continue
                    with suppress(FileNotFoundError, ValueError):
                        found = link.stat(follow_symlinks=False)
                        size = slot_bytes(int(target.rpartition(".")[2]))
                        yield Entry(key, size, Stamp.from_times(found.st_mtime_ns, found.st_atime_ns))

    def _folders(self) -> list[str]:
        with os.scandir(self._index) as folders:
            return [folder.path for folder in folders if folder.is_dir(follow_symlinks=False)]

    def collect(self, older_than_s: float) -> Garbage:
        """A slot of a dead writer is garbage at once: its lock says so, whatever its age."""
        garbage = Garbage()
        with self._allocation():
            for segment in self._all_segments():
                garbage += Garbage(*segment.reclaim())
                for slot, generation, name, _ in segment.used():
                    if self._is_orphan(segment, slot, generation, name):
                        segment.retire(slot, generation)
                        garbage += Garbage(1, segment.slot_bytes)
            self._drop_empty_segments()
            for name in os.listdir(self._folder):
                if name.startswith("."):  # a segment that was being made: that takes the allocation lock
                    (self._folder / name).unlink(missing_ok=True)
        return garbage + self._collect_links(older_than_s)

    def _collect_links(self, older_than_s: float) -> Garbage:
        """Links that were stamped but not published when their writer died."""
        garbage, now = Garbage(), time.time()
        for folder in self._folders():
            with suppress(FileNotFoundError), os.scandir(folder) as links:
                for link in links:
                    with suppress(FileNotFoundError):
                        found = link.stat(follow_symlinks=False)
                        if Key.parse(link.name) is None and now - found.st_ctime >= older_than_s:
                            os.unlink(link.path)
                            garbage += Garbage(1, 0)
        return garbage

    def _is_orphan(self, segment: Segment, slot: int, generation: int, name: str) -> bool:
        """Whether a writer died before it published the slot, or a deleter after it dropped the link."""
        prefix = f"{segment.id}.{slot}.{generation}."
        if (_readlink(f"{self._prefix}{name[:3]}/{name}") or "").startswith(prefix):
            return False
        if not segment.pin(slot):  # its writer is alive
            return False
        segment.unpin(slot)
        return not (_readlink(f"{self._prefix}{name[:3]}/{name}") or "").startswith(prefix)

    def _drop_empty_segments(self) -> None:
        for segment in self._all_segments():
            if segment.free_slots == segment.slots:
                (self._folder / f"{segment.id}.{segment.slot_bytes}").unlink(missing_ok=True)
                del self._segments[segment.id]
                segment.close()

    def free_bytes(self) -> int | None:
        with self._allocation():
            segments = self._all_segments()
            taken = sum(segment_bytes(segment.slot_bytes) for segment in segments)
            return max(0, self.capacity_bytes - taken) + sum(s.free_slots * s.slot_bytes for s in segments)

    def close(self) -> None:
        with self._mutex:
            for segment in self._segments.values():
                segment.close()
            self._segments.clear()
            if self._lock_file >= 0:
                os.close(self._lock_file)
                self._lock_file = -1

    def _allocate(self, nbytes: int) -> tuple[Segment, int]:
        size = slot_bytes(nbytes)
        with self._allocation():
            segments = self._all_segments()
            for segment in segments:
                slot = segment.allocate() if segment.slot_bytes == size else None
                if slot is not None:
                    return segment, slot
            taken = sum(segment_bytes(segment.slot_bytes) for segment in segments)
            if taken + segment_bytes(size) > self.capacity_bytes:
                raise StoreFull(f"{self.root}: its {self.capacity_bytes} bytes are taken")
            try:
                segment = self._open(Segment.create(self._folder, secrets.token_hex(8), size))
            except OSError as error:
                raise StoreFull(f"{self.root}: {error.strerror}") from error
            slot = segment.allocate()
            assert slot is not None
            return segment, slot

    @contextmanager
    def _allocation(self) -> Iterator[None]:
        """One allocator at a time, over threads and processes; the kernel unlocks for one that dies."""
        with self._mutex:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def _all_segments(self) -> list[Segment]:
        """Those that are there now; the mutex is held."""
        names = [name for name in os.listdir(self._folder) if not name.startswith(".")]
        present = {name.partition(".")[0] for name in names}
        for gone in self._segments.keys() - present:
            self._segments.pop(gone).close()
        for name in names:
            if name.partition(".")[0] not in self._segments:
                with suppress(OSError, ValueError):  # dropped meanwhile, or cut short by somebody
                    self._open(self._folder / name)
        return list(self._segments.values())

    def _open(self, path: Path) -> Segment:
        segment = Segment(path)
        self._segments[segment.id] = segment
        return segment

    def _place(self, link: str | None) -> _Place | None:
        """What a link points at, or None when it is gone or was never one of ours."""
        if link is None:
            return None
        try:
            ident, slot, generation, nbytes = link.split(".")
            place = int(slot), int(generation), int(nbytes)
        except ValueError:
            return None
        segment = self._segments.get(ident)
        if segment is None:
            with self._allocation():
                segment = next((s for s in self._all_segments() if s.id == ident), None)
        if segment is None or not 0 <= place[0] < segment.slots or place[2] > segment.slot_bytes:
            return None
        return (segment, *place)

    def _path(self, key: Key) -> str:
        name = key.name
        return f"{self._prefix}{name[:3]}/{name}"


class _PinnedBlob(Blob):
    def __init__(self, segment: Segment, slot: int, nbytes: int) -> None:
        self._segment: Segment | None = segment
        self._slot = slot
        super().__init__(segment.view(slot, nbytes).toreadonly())

    def close(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.unpin(self._slot)


def _readlink(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None
