"""A backend whose calls can be made to fail, hang, lie or happen in between, for tests of those above it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from vllm_deepinfer.store.base import Backend, Blob, Entry, Garbage, Item
from vllm_deepinfer.store.keys import Key
from vllm_deepinfer.store.stamp import Stamp


class Faulty(Backend):
    """Runs `before(op)` ahead of every call: it may raise, wait, or change the store.

    Args:
        inner: What does the work.
    """

    name = "faulty"

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.before: Callable[[str], None] = lambda op: None
        self.lies = False
        self.calls: list[str] = []

    def _go(self, op: str) -> None:
        self.calls.append(op)
        self.before(op)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        self._go("contains")
        return [True] * len(keys) if self.lies else self.inner.contains(keys)

    def get(self, key: Key) -> Blob | None:
        self._go("get")
        return self.inner.get(key)

    def put(self, item: Item) -> bool:
        self._go("put")
        return self.inner.put(item)

    def touch(self, keys: Sequence[Key], stamp: Stamp, hit: bool = True) -> None:
        self._go("touch")
        self.inner.touch(keys, stamp, hit)

    def delete(self, keys: Sequence[Key]) -> list[bool]:
        self._go("delete")
        return self.inner.delete(keys)

    def scan(self) -> Iterator[Entry]:
        self._go("scan")
        return self.inner.scan()

    def collect(self, older_than_s: float) -> Garbage:
        self._go("collect")
        return self.inner.collect(older_than_s)

    def close(self) -> None:
        self.inner.close()
