"""The directory backend beside a plain sequential copy on the same disk, in turn.

Both sides begin with nothing of their files in the page cache and end with everything on the disk. The
yardstick is the faster of buffered and O_DIRECT access, one file, 1 MiB at a time, one fsync; the store is
read both ways too (`direct=1` of its address), and the faster counts.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from vllm_deepinfer.store.base import Item
from vllm_deepinfer.store.codec import Section, decode, encode
from vllm_deepinfer.store.conformance import keys
from vllm_deepinfer.store.directory import DirectoryBackend
from vllm_deepinfer.store.keys import Key
from vllm_deepinfer.store.stamp import Stamp

MIB = 1 << 20
READERS = 4
_BATCH = 32


@dataclass(frozen=True)
class DiskRound:
    """MB/s of one round: yardstick and store, written and read; the store read past the page cache."""

    sequential_write: float
    sequential_read: float
    store_write: float
    store_read: float
    store_read_direct: float


def measure(folder: Path, total: int, object_bytes: int = MIB) -> DiskRound:
    """One round in a folder on the disk in question; `total` bytes on each side."""
    folder.mkdir(parents=True, exist_ok=True)
    payload = os.urandom(object_bytes)
    file = folder / "sequential"
    writes, reads = [], []
    for direct in (False, True):
        writes.append(_sequential_write(file, total, direct))
        _forget([file])
        reads.append(_sequential_read(file, total, direct))
        file.unlink()
    backend = DirectoryBackend(folder / "kv")
    chain = keys(total // object_bytes, "disk")
    write = _store_write(backend, chain, payload)
    _forget((folder / "kv").rglob("*"))
    buffered = _store_read(backend, chain, object_bytes)
    _forget((folder / "kv").rglob("*"))
    past_cache = DirectoryBackend(folder / "kv", direct=True)
    direct_read = _store_read(past_cache, chain, object_bytes)
    past_cache.close()
    backend.delete(chain)
    backend.close()
    return DiskRound(max(writes), max(reads), write, max(buffered, direct_read), direct_read)


def _sequential_write(path: Path, total: int, direct: bool) -> float:
    buffer = mmap.mmap(-1, MIB)
    buffer.write(os.urandom(MIB))
    start = time.perf_counter()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0))
    for _ in range(total // MIB):
        os.write(file, buffer)
    os.fsync(file)
    os.close(file)
    return total / (time.perf_counter() - start) / 1e6


def _sequential_read(path: Path, total: int, direct: bool) -> float:
    buffer = mmap.mmap(-1, MIB)
    start = time.perf_counter()
    file = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    for i in range(total // MIB):
        os.preadv(file, [buffer], i * MIB)
    os.close(file)
    return total / (time.perf_counter() - start) / 1e6


def _store_write(backend: DirectoryBackend, chain: list[Key], payload: bytes) -> float:
    """As the connector writes: encode with checksum, put in batches, fsync before each is published."""
    sections, stamp = (Section("full 0", len(payload)),), Stamp.new(time.time(), 3_600, 1)
    start = time.perf_counter()
    for first in range(0, len(chain), _BATCH):
        batch = chain[first : first + _BATCH]
        results = backend.put_many([Item(k, encode(k, sections, [payload]), stamp) for k in batch])
        if results != [True] * len(batch):
            raise RuntimeError(f"the store could not write: {next(r for r in results if r is not True)}")
    return len(chain) * len(payload) / (time.perf_counter() - start) / 1e6


def _store_read(backend: DirectoryBackend, chain: list[Key], nbytes: int) -> float:
    """As the connector reads: four threads, every byte checked."""
    sections = (Section("full 0", nbytes),)

    def read(key: Key) -> int:
        blob = backend.get(key)
        if blob is None:
            raise RuntimeError("the store has lost an object")
        with blob:
            return sum(value.nbytes for value in decode(blob.data, key, sections))

    with ThreadPoolExecutor(READERS) as pool:
        start = time.perf_counter()
        total = sum(pool.map(read, chain))
        return total / (time.perf_counter() - start) / 1e6


def _forget(paths: Iterable[Path]) -> None:
    """Drop files from the page cache; they are on the disk already."""
    for path in paths:
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
