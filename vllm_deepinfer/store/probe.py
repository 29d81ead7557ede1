"""Measures a store where it stands: puts, lookups and checked reads of objects that go again afterwards."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from vllm_deepinfer.store.base import Backend, Item
from vllm_deepinfer.store.codec import Section, decode, encode
from vllm_deepinfer.store.errors import StoreError
from vllm_deepinfer.store.keys import Key, chain
from vllm_deepinfer.store.stamp import Stamp

THREADS = 4


@dataclass(frozen=True)
class Probe:
    """One operation: megabytes per second over all threads, milliseconds of single calls."""

    name: str
    mb_per_s: float | None
    median_ms: float
    p99_ms: float


def probe(backend: Backend, count: int, nbytes: int, advance: Callable[[int], None]) -> list[Probe]:
    """Measure with `count` objects of `nbytes` under random keys; they live for ten minutes at most.

    Raises:
        StoreError: a put fails, or an object is gone before it is read.
    """
    keys = chain(os.urandom(32), range(count), 1)
    payload, sections = os.urandom(nbytes), (Section("probe", nbytes),)
    stamp = Stamp.new(time.time(), 600, 0)

    def put(key: Key) -> None:
        backend.put(Item(key, encode(key, sections, [payload]), stamp))

    def look(key: Key) -> None:
        backend.contains([key])

    def get(key: Key) -> None:
        blob = backend.get(key)
        if blob is None:
            raise StoreError("an object was gone before it was read")
        with blob:
            decode(blob.data, key, sections)

    try:
        return [
            _run("put", put, keys, nbytes, advance),
            _run("lookup", look, keys, None, advance),
            _run("get", get, keys, nbytes, advance),
        ]
    finally:
        backend.delete(keys)


def _run(
    name: str,
    call: Callable[[Key], None],
    keys: list[Key],
    nbytes: int | None,
    advance: Callable[[int], None],
) -> Probe:
    def timed(key: Key) -> float:
        start = time.perf_counter()
        call(key)
        advance(1)
        return time.perf_counter() - start

    with ThreadPoolExecutor(THREADS) as pool:
        start = time.perf_counter()
        times = sorted(pool.map(timed, keys))
        wall = time.perf_counter() - start
    rate = None if nbytes is None else len(keys) * nbytes / wall / 1e6
    return Probe(
        name, rate, 1e3 * times[len(times) // 2], 1e3 * times[min(len(times) - 1, int(0.99 * len(times)))]
    )
