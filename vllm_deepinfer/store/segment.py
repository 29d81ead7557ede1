"""One segment of the shared-memory store: slots of one size in a file that every process keeps mapped.

A slot's life is told by its table row (state, generation, size, name) and by a lock on its byte of the file,
which the kernel drops when its holder dies:

    free ─ allocate ─► writing (exclusive lock) ─ commit ─► used ─ delete ─► free
                                                              └─ under a reader ─► condemned ─ later ─► free

A reader holds a shared lock while it looks: nothing is freed, let alone written, under it. A `writing` or
`condemned` slot whose lock is free belongs to nobody. Shared and exclusive locks go through two open files,
so that they exclude each other within a process as well as between processes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

FREE, WRITING, USED, CONDEMNED = range(4)
SEGMENT_BYTES = 64 << 20
_NAME_BYTES = 112
_ROW = np.dtype([("state", "<u4"), ("generation", "<u4"), ("nbytes", "<u8"), ("name", f"S{_NAME_BYTES}")])
_FLOCK = struct.Struct("hhqqi4x")
_ROW_WORDS = _ROW.itemsize // 4


def slot_bytes(nbytes: int) -> int:
    """Slot size for an object: whole pages, in steps that lose at most an eighth."""
    step = max(mmap.PAGESIZE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


class Segment:
    """A mapped segment file, named `<id>.<slot bytes>`.

    Args:
        path: The file; `create` makes it first.

    Raises:
        OSError: it is not there or cannot be mapped.
        ValueError: it is shorter than its name says; mapped, it would end the process by SIGBUS.
    """

    def __init__(self, path: Path) -> None:
        self.id, _, size = path.name.partition(".")
        self.slot_bytes = int(size)
        self.slots = _slots(self.slot_bytes)
        self._base = _table_bytes(self.slots)
        total = self._base + self.slots * self.slot_bytes
        self._readers = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._writers = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(self._readers).st_size < total:
            self.close()
            raise ValueError(f"segment {path} is shorter than {total} bytes")
        self._map = mmap.mmap(self._readers, total)
        self._table: npt.NDArray[np.void] = np.frombuffer(self._map, _ROW, self.slots)
        self._bytes = memoryview(self._map)
        self._words = memoryview(self._map)[: self.slots * _ROW.itemsize].cast("I")
        self._writing: set[int] = set()
        self._pins: dict[int, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def create(cls, folder: Path, ident: str, size: int) -> Path:
        """Make a segment file with its memory allocated, so that no later write can fail.

        Raises:
            OSError: ENOSPC among others; no file is left.
        """
        total = segment_bytes(size)
        path, temporary = folder / f"{ident}.{size}", folder / f".{ident}"
        file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        try:
            os.posix_fallocate(file, 0, total)
            os.rename(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
        finally:
            os.close(file)
        return path

    # ── writers; the caller holds the store's allocation lock for `allocate` ──

    def allocate(self) -> int | None:
        """A slot that is now this caller's, or None when there is no free one."""
        states = self._table["state"]
        for slot in (*np.flatnonzero(states == FREE).tolist(), *self._abandoned()):
            if self._take(slot):
                self._table[slot]["state"] = WRITING
                self._table[slot]["generation"] += 1
                return int(slot)
        return None

    def _take(self, slot: int) -> bool:
        with self._lock:
            if slot in self._writing or not _lock(self._writers, fcntl.F_WRLCK, slot):
                return False
            self._writing.add(slot)
            return True

    def _abandoned(self) -> Iterator[int]:
        states = self._table["state"]
        yield from np.flatnonzero((states == WRITING) | (states == CONDEMNED)).tolist()

    def view(self, slot: int, nbytes: int) -> memoryview:
        """The first bytes of a slot."""
        start = self._base + slot * self.slot_bytes
        return self._bytes[start : start + nbytes]

    def commit(self, slot: int, nbytes: int, name: str) -> None:
        """Say what an allocated slot holds; `release` afterwards."""
        row = self._table[slot]
        row["nbytes"], row["name"] = nbytes, name.encode()
        row["state"] = USED

    def release(self, slot: int, free: bool) -> None:
        """Let go of an allocated slot, whose content stays (`free` False) or not."""
        with self._lock:
            if free:
                self._table[slot]["state"] = FREE
            self._writing.discard(slot)
            _lock(self._writers, fcntl.F_UNLCK, slot)

    def retire(self, slot: int, generation: int) -> None:
        """Free a slot whose name is gone; under a reader it is condemned and freed later."""
        if self.generation(slot) != generation:
            return
        if self._take(slot):
            self.release(slot, free=True)
        else:
            self._table[slot]["state"] = CONDEMNED

    # ── readers ──

    def pin(self, slot: int) -> bool:
        """Keep a slot from being freed until `unpin`; False while a writer or a deleter has it."""
        with self._lock:
            count = self._pins.get(slot, 0)
            if not count and not _lock(self._readers, fcntl.F_RDLCK, slot):
                return False
            self._pins[slot] = count + 1
            return True

    def unpin(self, slot: int) -> None:
        """Undo one `pin`."""
        with self._lock:
            self._pins[slot] -= 1
            if not self._pins[slot]:
                del self._pins[slot]
                _lock(self._readers, fcntl.F_UNLCK, slot)

    # ── everybody ──

    def generation(self, slot: int) -> int:
        """How often the slot was allocated."""
        return self._words[slot * _ROW_WORDS + 1]  # a tenth of the time that a field of a numpy row takes

    def used(self) -> Iterator[tuple[int, int, str, int]]:
        """Slot, generation, name and bytes of each slot in use."""
        for slot in np.flatnonzero(self._table["state"] == USED).tolist():
            row = self._table[slot]
            yield slot, int(row["generation"]), bytes(row["name"]).decode(), int(row["nbytes"])

    def reclaim(self) -> tuple[int, int]:
        """Free what dead writers and past readers left: slots and bytes."""
        found = [slot for slot in self._abandoned() if self._take(slot)]
        for slot in found:
            self.release(slot, free=True)
        return len(found), len(found) * self.slot_bytes

    @property
    def free_slots(self) -> int:
        """Slots that `allocate` would find at once."""
        return int(np.count_nonzero(self._table["state"] == FREE))

    def close(self) -> None:
        """Close the files; the map lives as long as somebody looks at it."""
        os.close(self._readers)
        os.close(self._writers)


def segment_bytes(size: int) -> int:
    """Bytes of a whole segment of slots of that size."""
    slots = _slots(size)
    return _table_bytes(slots) + slots * size


def _slots(size: int) -> int:
    return max(1, SEGMENT_BYTES // size)


def _table_bytes(slots: int) -> int:
    return -(-slots * _ROW.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE


def _lock(file: int, kind: int, slot: int) -> bool:
    """Lock or unlock one byte without waiting; False when somebody else's lock forbids it."""
    request = _FLOCK.pack(kind, os.SEEK_SET, slot, 1, 0)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, request)
    except (BlockingIOError, PermissionError):
        return False
    return True
