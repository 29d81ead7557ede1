"""Fast tiers over a slow one: what is found below is copied up, what is put goes to all.

The slowest tier is the store; those above are caches of it that may lose anything. A tier that fails is
skipped: the others go on serving.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from queue import Empty, Full, Queue

from vllm_deepinfer.store.base import Backend, Blob, Entry, Garbage, Item
from vllm_deepinfer.store.errors import StoreError
from vllm_deepinfer.store.keys import Key
from vllm_deepinfer.store.stamp import Stamp

_PROMOTIONS = 32  # copies that wait at most; more are dropped, and come up at their next hit
_ANSWER = (StoreError, OSError)


class TieredBackend(Backend):
    """Several backends as one.

    Args:
        tiers: From the fastest to the slowest, at least one.
        promoted_ttl_s: How long a copy in a fast tier is worth keeping without another hit.
    """

    name = "tiered"

    def __init__(self, tiers: Sequence[Backend], promoted_ttl_s: float = 3_600.0) -> None:
        if not tiers:
            raise ValueError("a tiered store has at least one tier")
        self.tiers = tuple(tiers)
        self._promoted_ttl_s = promoted_ttl_s
        self._queue: Queue[tuple[Key, bytes, int]] = Queue(_PROMOTIONS)
        self._stop = threading.Event()
        self._promoter: threading.Thread | None = None

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        found, failed = [False] * len(keys), 0
        for tier in self.tiers:
            missing = [i for i, there in enumerate(found) if not there]
            if not missing:
                break
            try:
                for i, there in zip(missing, tier.contains([keys[i] for i in missing]), strict=True):
                    found[i] = there
            except _ANSWER:
                failed += 1
        if failed == len(self.tiers):
            raise StoreError("no tier of the store answers")
        return found

    def get(self, key: Key) -> Blob | None:
        failed: Exception | None = None
        for level, tier in enumerate(self.tiers):
            try:
                blob = tier.get(key)
            except _ANSWER as error:
                failed = error
                continue
            if blob is not None:
                if level:
                    self._promote(key, blob, level)
                return blob
        if failed is not None:
            raise failed
        return None

    def put(self, item: Item) -> bool:
        """Whether any tier took it as new; only when every tier fails, the slowest one's error is raised."""
        results = [tier.try_put(item) for tier in reversed(self.tiers)]
        return self._outcome(results)

    def put_many(self, items: Sequence[Item]) -> list[bool | StoreError]:
        by_tier = [tier.put_many(items) for tier in reversed(self.tiers)]
        outcomes: list[bool | StoreError] = []
        for results in zip(*by_tier, strict=True):
            try:
                outcomes.append(self._outcome(results))
            except StoreError as error:
                outcomes.append(error)
        return outcomes

    @staticmethod
    def _outcome(results: Sequence[bool | StoreError]) -> bool:
        """The slowest tier's answer, or the next one's where it fails."""
        answers = [result for result in results if not isinstance(result, StoreError)]
        if not answers:
            assert isinstance(results[0], StoreError)
            raise results[0]
        return answers[0]

    def touch(self, keys: Sequence[Key], stamp: Stamp, hit: bool = True) -> None:
        for tier in self.tiers:
            with suppress(*_ANSWER):
                tier.touch(keys, stamp, hit)

    def delete(self, keys: Sequence[Key]) -> list[bool]:
        results = [tier.delete(keys) for tier in self.tiers]
        return [any(row) for row in zip(*results, strict=True)]

    def scan(self) -> Iterator[Entry]:
        """Each object once, as its slowest tier has it."""
        seen: set[bytes] = set()
        for tier in reversed(self.tiers):
            for entry in tier.scan():
                if entry.key.digest not in seen:
                    seen.add(entry.key.digest)
                    yield entry

    def collect(self, older_than_s: float) -> Garbage:
        return sum((tier.collect(older_than_s) for tier in self.tiers), Garbage())

    def free_bytes(self) -> int | None:
        return self.tiers[-1].free_bytes()

    def close(self) -> None:
        self._stop.set()
        if self._promoter is not None:
            self._promoter.join(timeout=5)
        for tier in self.tiers:
            tier.close()

    def settle(self) -> None:
        """Wait until everything that was found below has been copied up."""
        self._queue.join()

    def _promote(self, key: Key, blob: Blob, level: int) -> None:
        if self._promoter is None:
            self._promoter = threading.Thread(target=self._run, name="store-promote", daemon=True)
            self._promoter.start()
        if not self._queue.full():  # before the copy, not after it
            with suppress(Full):
                self._queue.put_nowait((key, bytes(blob.data), level))

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                key, data, level = self._queue.get(timeout=0.2)
            except Empty:
                continue
            stamp = Stamp.new(time.time(), self._promoted_ttl_s, 0)
            for tier in self.tiers[:level]:
                tier.try_put(Item(key, [data], stamp))
            self._queue.task_done()
