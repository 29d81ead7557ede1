"""Page-aligned buffers for reads, used again: a fresh one costs a page fault per 4 KiB, as much as a copy."""

from __future__ import annotations

import mmap
import threading

from vllm_deepinfer.store.base import Blob

PAGE = mmap.PAGESIZE


class BufferPool:
    """Keeps up to `keep_bytes` of buffers that were given back. Thread-safe.

    A buffer that is still looked at when its blob closes is left to the garbage collector instead.
    """

    def __init__(self, keep_bytes: int = 64 << 20) -> None:
        self._keep_bytes = keep_bytes
        self._kept_bytes = 0
        self._free: dict[int, list[mmap.mmap]] = {}
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> mmap.mmap:
        """A buffer of at least `nbytes`, rounded up to whole pages; its content is anything."""
        size = max(PAGE, -(-nbytes // PAGE) * PAGE)
        with self._lock:
            free = self._free.get(size)
            if free:
                self._kept_bytes -= size
                return free.pop()
        return mmap.mmap(-1, size)

    def give(self, buffer: mmap.mmap) -> None:
        """Take a buffer back that nobody looks at any more."""
        size = len(buffer)
        with self._lock:
            if self._kept_bytes + size <= self._keep_bytes:
                self._kept_bytes += size
                self._free.setdefault(size, []).append(buffer)


class PooledBlob(Blob):
    """A blob whose bytes lie in a pool's buffer."""

    def __init__(self, buffer: mmap.mmap, nbytes: int, pool: BufferPool) -> None:
        self._buffer: mmap.mmap | None = buffer
        self._whole = memoryview(buffer)
        self._pool = pool
        super().__init__(self._whole[:nbytes])

    def close(self) -> None:
        """Give the buffer back."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        try:
            self.data.release()
            self._whole.release()
        except BufferError:  # a view of it lives on: never hand these bytes to another read
            return
        self._pool.give(buffer)
