"""The store as an engine uses it: lookups, verified loads and saves, each failure a counted miss.

Every method blocks on I/O; an engine calls them from `Workers`, never from its loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from vllm_deepinfer.policy.retention import Choice
from vllm_deepinfer.store.base import Backend, Blob, Buffer, Item
from vllm_deepinfer.store.codec import Opened, Sections, decode, encode, open_object
from vllm_deepinfer.store.errors import CorruptObject, StoreError, StoreFull
from vllm_deepinfer.store.keys import Key
from vllm_deepinfer.store.stamp import Stamp
from vllm_deepinfer.store.stats import StoreStats

logger = logging.getLogger(__name__)
LOOKUP_BATCH = 64
_REPAIRABLE = ("magic", "header", "key", "truncated", "checksum", "compression")


class Loaded:
    """The checked sections of one run; a context manager that gives the pin back."""

    def __init__(self, values: Sequence[memoryview], blob: Blob) -> None:
        self.values, self._blob = values, blob

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.values = ()
        self._blob.close()


@dataclass(frozen=True, slots=True)
class Saved:
    """What became of a save: runs that are new, were there already, and failed."""

    new: int = 0
    known: int = 0
    failed: int = 0


class PrefixStore:
    """A backend with codec, verification, retention stamps and statistics.

    Args:
        backend: From `uri.open_store`.
        stats: Where to count.
        zstd_level: Compress new objects; None stores them as they are.
        clock: Unix seconds.
        on_full: Called, in the saving thread, when a save found no room: time for a sweep.
    """

    def __init__(
        self,
        backend: Backend,
        stats: StoreStats | None = None,
        *,
        zstd_level: int | None = None,
        clock: Callable[[], float] = time.time,
        on_full: Callable[[], None] | None = None,
    ) -> None:
        self.backend, self.stats = backend, stats or StoreStats()
        self._zstd_level, self._clock, self._on_full = zstd_level, clock, on_full
        self._told: set[str] = set()

    def lookup(self, keys: Sequence[Key]) -> int:
        """How many runs from the first on are there, without a hole. 0 when the backend fails."""
        found = 0
        try:
            for start in range(0, len(keys), LOOKUP_BATCH):
                there = self.backend.contains(keys[start : start + LOOKUP_BATCH])
                found += len(there) if all(there) else there.index(False)
                if not all(there):
                    break
        except Exception as error:
            self._failed("lookup", error)
        return found

    def load(self, key: Key, sections: Sections) -> Loaded | None:
        """A run, checked; None when it is not there, the backend fails, or its bytes have changed."""
        blob = self._get(key)
        if blob is None:
            return None
        try:
            values = decode(blob.data, key, sections)
        except CorruptObject as error:
            blob.close()
            self._corrupt(key, error)
            return None
        except BaseException:
            blob.close()
            raise
        self.stats.add("loads", outcome="hit")
        return Loaded(values, blob)

    def load_into(self, keys: Sequence[Key], sections: Sections, copy: Callable[[int, Opened], bool]) -> bool:
        """Copy runs out of the store, and check each while it is copied.

        All are found and pinned before the first is copied: a copy empties the core's caches, and finding an
        object with cold caches takes four times as long.

        Args:
            keys: A few runs; all are held at once.
            sections: This engine's layout.
            copy: Gets a run's index and the run; copies its `values`, shows every byte to `check` in order,
                and returns False to stop. What it has copied is worth nothing unless the result is True.

        Returns:
            Whether every run was copied and is right.
        """
        blobs: list[Blob] = []
        try:
            for key in keys:
                blob = self._get(key)
                if blob is None:
                    return False
                blobs.append(blob)
            return self._copy_checked(keys, blobs, sections, copy)
        finally:
            for blob in blobs:
                blob.close()

    def _copy_checked(
        self,
        keys: Sequence[Key],
        blobs: Sequence[Blob],
        sections: Sections,
        copy: Callable[[int, Opened], bool],
    ) -> bool:
        key = keys[0] if keys else None
        try:
            opened = []
            for key, blob in zip(keys, blobs, strict=True):
                opened.append(open_object(blob.data, key, sections))
            for i, run in enumerate(opened):
                key = keys[i]
                if not copy(i, run):
                    return False
                run.finish()
        except CorruptObject as error:
            assert key is not None
            self._corrupt(key, error)
            return False
        self.stats.add("loads", len(keys), outcome="hit")
        return True

    def _get(self, key: Key) -> Blob | None:
        """The object, unchecked; None, counted, when it is not there or the backend fails."""
        try:
            blob = self.backend.get(key)
        except Exception as error:
            self._failed("load", error)
            return None
        if blob is None:
            self.stats.add("loads", outcome="missing")
        return blob

    def _corrupt(self, key: Key, error: CorruptObject) -> None:
        """A damaged object goes, so that its run is stored anew; one of another version is left alone."""
        self.stats.add("verification_failures", why=error.why)
        self._tell(f"corrupt {error.why}", "%s; the run is computed again", error)
        if error.why in _REPAIRABLE:
            try:
                self.backend.delete([key])
            except Exception as failure:
                self._failed("delete", failure)

    def touch(self, keys: Sequence[Key], choice: Choice) -> None:
        """Refresh runs that were hit."""
        try:
            self.backend.touch(keys, Stamp.new(self._clock(), choice.ttl_s, choice.code))
        except Exception as error:
            self._failed("touch", error)

    def missing(self, keys: Sequence[Key]) -> list[Key]:
        """Those that are not there; all of them when the backend fails."""
        try:
            return [key for key, there in zip(keys, self.backend.contains(keys), strict=True) if not there]
        except Exception as error:
            self._failed("lookup", error)
            return list(keys)

    def save(self, runs: Sequence[tuple[Key, Sequence[Buffer]]], sections: Sections, choice: Choice) -> Saved:
        """Store runs, each with one buffer per section; the buffers are free again afterwards."""
        stamp = Stamp.new(self._clock(), choice.ttl_s, choice.code)
        items = [Item(key, encode(key, sections, values, self._zstd_level), stamp) for key, values in runs]
        try:
            results = self.backend.put_many(items)
        except Exception as error:
            self._failed("save", error)
            results = [StoreError(str(error))] * len(items)
        errors = [result for result in results if isinstance(result, StoreError)]
        for failure in errors[:1]:
            self._tell(f"save {type(failure).__name__}", "%s; runs are not stored", failure)
        if self._on_full is not None and any(isinstance(e, StoreFull) for e in errors):
            self._on_full()
        new, known = results.count(True), results.count(False)
        for outcome, count in (("new", new), ("known", known), ("failed", len(errors))):
            if count:
                self.stats.add("saves", count, outcome=outcome)
        return Saved(new, known, len(errors))

    def _failed(self, op: str, error: Exception) -> None:
        self.stats.add("failures", op=op)
        self._tell(f"{op} {type(error).__name__}", f"the store's {op} failed and counts as a miss: %s", error)

    def _tell(self, what: str, text: str, error: Exception) -> None:
        """Log each kind of trouble once; all of it is counted."""
        if what not in self._told:
            self._told.add(what)
            logger.warning("prefix store: " + text, error)
