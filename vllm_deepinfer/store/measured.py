"""A backend that is timed: every call's duration and bytes, under its tier's name."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from vllm_deepinfer.store.base import Backend, Blob, Entry, Garbage, Item
from vllm_deepinfer.store.errors import StoreError
from vllm_deepinfer.store.keys import Key
from vllm_deepinfer.store.stamp import Stamp
from vllm_deepinfer.store.stats import StoreStats


class Measured(Backend):
    """Passes everything on to `inner` and tells `stats` how long it took."""

    def __init__(self, inner: Backend, stats: StoreStats) -> None:
        self.inner, self._stats, self.name = inner, stats, inner.name

    @contextmanager
    def _timed(self, op: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        except (StoreError, OSError) as error:
            self._stats.add("errors", tier=self.name, op=op, kind=type(error).__name__)
            raise
        finally:
            self._stats.observe("seconds", time.perf_counter() - start, op=op, tier=self.name)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        with self._timed("contains"):
            return self.inner.contains(keys)

    def get(self, key: Key) -> Blob | None:
        with self._timed("get"):
            blob = self.inner.get(key)
        self._stats.add("gets", tier=self.name, found="yes" if blob else "no")
        if blob is not None:
            self._stats.add("get_bytes", blob.data.nbytes, tier=self.name)
        return blob

    def put(self, item: Item) -> bool:
        with self._timed("put"):
            new = self.inner.put(item)
        self._count_put(item, new)
        return new

    def put_many(self, items: Sequence[Item]) -> list[bool | StoreError]:
        with self._timed("put"):
            results = self.inner.put_many(items)
        for item, result in zip(items, results, strict=True):
            self._count_put(item, result)
        return results

    def _count_put(self, item: Item, result: bool | StoreError) -> None:
        if result is True:
            self._stats.add("puts", tier=self.name)
            self._stats.add("put_bytes", item.nbytes, tier=self.name)
        elif isinstance(result, StoreError):
            self._stats.add("errors", tier=self.name, op="put", kind=type(result).__name__)

    def touch(self, keys: Sequence[Key], stamp: Stamp, hit: bool = True) -> None:
        with self._timed("touch"):
            self.inner.touch(keys, stamp, hit)

    def delete(self, keys: Sequence[Key]) -> list[bool]:
        with self._timed("delete"):
            return self.inner.delete(keys)

    def scan(self) -> Iterator[Entry]:
        return self.inner.scan()

    def collect(self, older_than_s: float) -> Garbage:
        return self.inner.collect(older_than_s)

    def free_bytes(self) -> int | None:
        return self.inner.free_bytes()

    def close(self) -> None:
        self.inner.close()
