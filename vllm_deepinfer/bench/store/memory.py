"""The shared-memory backend beside memcpy, in turn: objects of 1 MiB out of a set larger than the caches.

Ours: find, pin, check every byte, copy into the reader's buffer, unpin. Memcpy: the copy alone. One thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_deepinfer.store.base import Item
from vllm_deepinfer.store.codec import Section, decode, encode
from vllm_deepinfer.store.conformance import keys
from vllm_deepinfer.store.memory import MemoryBackend
from vllm_deepinfer.store.stamp import Stamp

MIB = 1 << 20
_SECTIONS = (Section("full 0", MIB),)


@dataclass(frozen=True)
class MemoryRound:
    """GB/s of one round."""

    memcpy: float
    store: float


def measure(folder: Path, objects: int, rounds: int) -> list[MemoryRound]:
    """Rounds in turn over `objects` MiB at `folder` on tmpfs. The first pass, which maps, is not counted."""
    backend = MemoryBackend(folder, 4 * objects * MIB)
    chain = keys(objects, "memory")
    stamp = Stamp.new(time.time(), 3_600, 1)
    source = np.random.default_rng(0).integers(0, 256, objects * MIB, dtype=np.uint8)
    target = np.zeros(objects * MIB, dtype=np.uint8)
    for i, key in enumerate(chain):
        backend.put(Item(key, encode(key, _SECTIONS, [source[i * MIB : (i + 1) * MIB].data]), stamp))

    def ours() -> None:
        for i, key in enumerate(chain):
            blob = backend.get(key)
            if blob is None:
                raise RuntimeError("the memory store has lost an object")
            with blob:
                (value,) = decode(blob.data, key, _SECTIONS)
                target[i * MIB : (i + 1) * MIB] = np.frombuffer(value, dtype=np.uint8)

    def memcpy() -> None:
        for i in range(objects):
            target[i * MIB : (i + 1) * MIB] = source[i * MIB : (i + 1) * MIB]

    ours()
    if not np.array_equal(source, target):
        raise RuntimeError("the memory store returned other bytes")
    memcpy()
    found = [MemoryRound(_speed(memcpy, objects), _speed(ours, objects)) for _ in range(rounds)]
    backend.close()
    return found


def _speed(function: Callable[[], None], objects: int) -> float:
    start = time.perf_counter()
    function()
    return objects * MIB / (time.perf_counter() - start) / 1e9
