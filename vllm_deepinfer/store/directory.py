"""Objects as files: local NVMe, tmpfs, NFS, or 3FS through its mount. The file system is the index.

    ROOT/v1/objects/3f7/<key name>    4,096 folders; 100 M objects make 25,000 files in each
    ROOT/v1/tmp/<random>              what is being written

An object is written under `tmp`, stamped, fsynced and renamed: a reader sees all of it or nothing, and a
crash leaves a file in `tmp`. The folder is not fsynced: losing a rename with the power is a miss. `v1` is the
layout version; a store of another version beside it is neither read nor touched. Reads go through `pread`,
never `mmap`: a file that somebody truncates, or a bad sector, would end an engine by SIGBUS.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from vllm_deepinfer.store.base import Backend, Blob, Entry, Garbage, Item
from vllm_deepinfer.store.buffers import PAGE, BufferPool, PooledBlob
from vllm_deepinfer.store.errors import StoreError, StoreFull
from vllm_deepinfer.store.keys import Key
from vllm_deepinfer.store.stamp import Stamp

VERSION_FOLDER = "v1"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
_IOV_MAX = 1024
_BATCH = 8  # puts whose fsyncs are in flight together: the journal commits them as one


class DirectoryBackend(Backend):
    """A folder as a store.

    Args:
        root: Made if missing. Several engines, also on several machines, may share it.
        direct: Read past the page cache (O_DIRECT), where the cached copy would only displace other memory.
        sync: Fsync before an object is published. Without it a power cut may leave objects that fail their
            checksum; a killed process does not.

    Raises:
        StoreError: the folder cannot be made or entered.
    """

    name = "directory"

    def __init__(self, root: Path, *, direct: bool = False, sync: bool = True) -> None:
        self.root = root
        self._objects = root / VERSION_FOLDER / "objects"
        self._tmp = root / VERSION_FOLDER / "tmp"
        self._prefix = f"{self._objects}/"
        self._direct, self._sync = direct and hasattr(os, "O_DIRECT"), sync
        self._pool = BufferPool()
        self._writers: ThreadPoolExecutor | None = None
        try:
            self._objects.mkdir(parents=True, exist_ok=True)
            self._tmp.mkdir(exist_ok=True)
        except OSError as error:
            if not self._objects.is_dir():  # a read-only store that is there already can be read
                raise StoreError(f"the store {root} cannot be opened: {error.strerror}") from error

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        return [os.access(self._path(key), os.F_OK) for key in keys]

    def get(self, key: Key) -> Blob | None:
        flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if self._direct else 0)
        try:
            file = os.open(self._path(key), flags | os.O_NOATIME)
        except FileNotFoundError:
            return None
        except PermissionError:  # O_NOATIME is for the owner
            file = os.open(self._path(key), flags)
        try:
            return self._read(file)
        finally:
            os.close(file)

    def _read(self, file: int) -> Blob:
        size = os.fstat(file).st_size
        buffer = self._pool.take(size)
        done = 0
        with memoryview(buffer) as view:
            while done < size:  # a truncated file ends early; the codec finds out
                read = os.preadv(file, [view[done:]], done)
                done += read
                if read == 0 or (self._direct and done % PAGE):
                    break
        return PooledBlob(buffer, min(done, size), self._pool)

    def put(self, item: Item) -> bool:
        path = self._path(item.key)
        if os.access(path, os.F_OK):
            self.touch([item.key], item.stamp, hit=False)
            return False
        temporary = str(self._tmp / f"{secrets.token_hex(12)}.{item.key.name[:16]}")
        try:
            self._write(temporary, item)
            self._publish(temporary, path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(temporary)
            if error.errno in _NO_ROOM:
                raise StoreFull(f"{self.root}: {error.strerror}") from error
            raise StoreError(f"{self.root}: {error.strerror}") from error
        return True

    def _write(self, path: str, item: Item) -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        try:
            views = [memoryview(part).cast("B") for part in item.parts]
            while views:
                written = os.writev(file, views[:_IOV_MAX])
                while views and written >= views[0].nbytes:
                    written -= views.pop(0).nbytes
                if written:
                    views[0] = views[0][written:]
            os.utime(file, ns=(item.stamp.atime_ns, item.stamp.mtime_ns))
            if self._sync:
                os.fsync(file)
        finally:
            os.close(file)

    def _publish(self, temporary: str, path: str) -> None:
        try:
            os.rename(temporary, path)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.rename(temporary, path)

    def put_many(self, items: Sequence[Item]) -> list[bool | StoreError]:
        if len(items) < 2 or not self._sync:
            return super().put_many(items)
        if self._writers is None:
            self._writers = ThreadPoolExecutor(_BATCH, "store-write")
        return list(self._writers.map(self.try_put, items))

    def touch(self, keys: Sequence[Key], stamp: Stamp, hit: bool = True) -> None:
        for key in keys:
            path = self._path(key)
            with suppress(OSError):  # gone meanwhile, or read-only: a hit that is not recorded
                found = os.stat(path)
                new = Stamp.from_times(found.st_mtime_ns, found.st_atime_ns).refreshed(stamp, hit)
                os.utime(path, ns=(new.atime_ns, new.mtime_ns))

    def delete(self, keys: Sequence[Key]) -> list[bool]:
        done = []
        for key in keys:
            try:
                os.unlink(self._path(key))
                done.append(True)
            except FileNotFoundError:
                done.append(False)
            except OSError as error:
                raise StoreError(f"{self.root}: {error.strerror}") from error
        return done

    def scan(self) -> Iterator[Entry]:
        for folder in self._folders():
            with suppress(FileNotFoundError), os.scandir(folder) as files:
                for file in files:
                    key = Key.parse(file.name)
                    if key is None:
                        continue
                    with suppress(FileNotFoundError):
                        found = file.stat(follow_symlinks=False)
                        if stat.S_ISREG(found.st_mode):
                            stamp = Stamp.from_times(found.st_mtime_ns, found.st_atime_ns)
                            yield Entry(key, found.st_size, stamp)

    def _folders(self) -> list[str]:
        with os.scandir(self._objects) as folders:
            return [folder.path for folder in folders if folder.is_dir(follow_symlinks=False)]

    def collect(self, older_than_s: float) -> Garbage:
        garbage, now = Garbage(), time.time()
        with os.scandir(self._tmp) as files:
            for file in files:
                with suppress(FileNotFoundError):
                    found = file.stat(follow_symlinks=False)
                    if now - found.st_ctime >= older_than_s:  # mtime is the stamp's
                        os.unlink(file.path)
                        garbage += Garbage(1, found.st_size)
        return garbage

    def free_bytes(self) -> int | None:
        found = os.statvfs(self._objects)
        return found.f_bavail * found.f_frsize

    def close(self) -> None:
        if self._writers is not None:
            self._writers.shutdown(wait=False)
            self._writers = None

    def _path(self, key: Key) -> str:
        name = key.name
        return f"{self._prefix}{name[:3]}/{name}"
