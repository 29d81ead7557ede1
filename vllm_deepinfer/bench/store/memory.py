"""The shared-memory backend beside memcpy, in turn: objects of 1 MiB out of a set larger than the caches.

Ours: find, pin, copy into the reader's buffer and check every byte, unpin. Memcpy: the copy alone, out of
this process's own memory. Both into the same buffer, which was written to before; one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from vllm_deepinfer.store.base import Item
from vllm_deepinfer.store.codec import Opened, Section, encode
from vllm_deepinfer.store.conformance import keys
from vllm_deepinfer.store.memory import MemoryBackend
from vllm_deepinfer.store.prefix_store import PrefixStore
from vllm_deepinfer.store.segment import SEGMENT_BYTES
from vllm_deepinfer.store.stamp import Stamp

MIB = 1 << 20
BATCH = 16  # as the connector's worker


@dataclass(frozen=True)
class MemoryRound:
    """GB/s of one round."""

    memcpy: float
    store: float


def measure(folder: Path, total: int, rounds: int, object_bytes: int = MIB) -> list[MemoryRound]:
    """Rounds in turn over `total` bytes at `folder` on tmpfs. The first pass, which maps, is not counted."""
    count = total // object_bytes
    backend, chain = MemoryBackend(folder, 4 * total + 2 * SEGMENT_BYTES), keys(count, "memory")
    sections, stamp = (Section("full 0", object_bytes),), Stamp.new(time.time(), 3_600, 1)
    source = np.random.default_rng(0).integers(0, 256, count * object_bytes, dtype=np.uint8)
    target = np.zeros_like(source)
    have, room = (
        [array.data[i * object_bytes : (i + 1) * object_bytes] for i in range(count)]
        for array in (source, target)
    )
    for key, value in zip(chain, have, strict=True):
        backend.put(Item(key, encode(key, sections, [value]), stamp))
    store = PrefixStore(backend)

    def copy(first: int, i: int, opened: Opened) -> bool:
        opened.copy_to([room[first + i]])
        return True

    def ours() -> None:
        for first in range(0, count, BATCH):
            if not store.load_into(chain[first : first + BATCH], sections, partial(copy, first)):
                raise RuntimeError("the memory store has lost an object")

    def memcpy() -> None:
        for value, place in zip(have, room, strict=True):
            place[:] = value

    ours()
    if not np.array_equal(source, target):
        raise RuntimeError("the memory store returned other bytes")
    memcpy()
    nbytes = count * object_bytes
    found = [MemoryRound(_speed(memcpy, nbytes), _speed(ours, nbytes)) for _ in range(rounds)]
    backend.delete(chain)
    backend.collect(0.0)
    backend.close()
    return found


def _speed(function: Callable[[], None], nbytes: int) -> float:
    start = time.perf_counter()
    function()
    return nbytes / (time.perf_counter() - start) / 1e9
