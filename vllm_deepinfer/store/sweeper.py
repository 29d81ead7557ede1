"""Keeps a store within its capacity: removes what `policy/retention` says, and tells what went and why.

One sweeper per store at a time is enough; several do no harm, they plan from what they see. A wall clock that
jumped is not believed at once: the pass after a jump only collects garbage, the next one trusts the new time.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from vllm_deepinfer.policy.retention import Held, Recompute, Retention, plan
from vllm_deepinfer.store.base import Backend, Entry, Garbage
from vllm_deepinfer.store.errors import StoreError
from vllm_deepinfer.store.stats import StoreStats
from vllm_deepinfer.store.tiered import TieredBackend

logger = logging.getLogger(__name__)
JUMP_S = 300.0
GARBAGE_AGE_S = 3_600.0
_BATCH = 256
_RECOMPUTE = Recompute()


@dataclass
class Swept:
    """What one pass did.

    Attributes:
        objects, nbytes: What is left.
        removed: Objects per reason.
        removed_bytes: Bytes per reason.
        garbage: Leftovers of crashed writers.
        clock_jumped: Nothing was judged by its age, because the wall clock jumped.
    """

    objects: int = 0
    nbytes: int = 0
    removed: Counter[str] = field(default_factory=Counter)
    removed_bytes: Counter[str] = field(default_factory=Counter)
    garbage: Garbage = field(default_factory=Garbage)
    clock_jumped: bool = False


def held(entries: Iterable[Entry]) -> list[Held]:
    """A scan in the policy's words."""
    return [
        Held(
            id=e.key.id,
            parent=e.key.parent,
            start=e.key.start,
            tokens=e.key.tokens,
            nbytes=e.nbytes,
            expires=e.stamp.expires,
            last_use=e.stamp.last_use,
            hits=e.stamp.hits,
            code=e.stamp.traffic_class,
        )
        for e in entries
    ]


class Sweeper:
    """Sweeps one backend, tier by tier.

    Args:
        backend: What to sweep.
        capacity_bytes: Of the slowest tier; None leaves it to expiry. A tier with a `capacity_bytes` of its
            own is held to that.
        retention: Traffic classes.
        stats: Where to count.
        recompute: What a run costs to compute again.
        wall, monotonic: Clocks, in seconds.
    """

    def __init__(
        self,
        backend: Backend,
        capacity_bytes: int | None,
        retention: Retention,
        stats: StoreStats | None = None,
        *,
        recompute: Recompute = _RECOMPUTE,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend, self._capacity, self._retention = backend, capacity_bytes, retention
        self._stats, self._recompute = stats or StoreStats(), recompute
        self._wall, self._monotonic = wall, monotonic
        self._last: tuple[float, float] | None = None

    def sweep(
        self, progress: Callable[[int, int], None] | None = None, garbage_age_s: float = GARBAGE_AGE_S
    ) -> Swept:
        """One pass.

        Args:
            progress: Called with objects removed and to be removed.
            garbage_age_s: Leftovers younger than that may still be in the making.

        Raises:
            StoreError: the backend cannot be scanned.
        """
        result = Swept(clock_jumped=self._jumped())
        inner = self._backend
        tiers: Sequence[Backend] = inner.tiers if isinstance(inner, TieredBackend) else (inner,)
        for level, tier in enumerate(tiers):
            slowest = level == len(tiers) - 1
            self._sweep_tier(tier, result, slowest, progress)
            result.garbage += tier.collect(garbage_age_s)
        self._count(result)
        return result

    def _sweep_tier(
        self, tier: Backend, result: Swept, slowest: bool, progress: Callable[[int, int], None] | None
    ) -> None:
        entries = list(tier.scan())
        if result.clock_jumped:
            going = []
        else:
            own: int | None = getattr(getattr(tier, "inner", tier), "capacity_bytes", None)
            capacity = own if own is not None else self._capacity if slowest else None
            going = plan(held(entries), self._wall(), capacity, self._retention, self._recompute)
        for start in range(0, len(going), _BATCH):
            batch = going[start : start + _BATCH]
            done = tier.delete([entries[removal.index].key for removal in batch])
            for removal, gone in zip(batch, done, strict=True):
                if gone:
                    result.removed[removal.reason] += 1
                    result.removed_bytes[removal.reason] += entries[removal.index].nbytes
            if progress is not None:
                progress(min(start + _BATCH, len(going)), len(going))
        if slowest:
            gone_indices = {removal.index for removal in going}
            left = [entry for i, entry in enumerate(entries) if i not in gone_indices]
            result.objects, result.nbytes = len(left), sum(entry.nbytes for entry in left)

    def _jumped(self) -> bool:
        now = self._wall(), self._monotonic()
        last, self._last = self._last, now
        jumped = last is not None and abs((now[0] - last[0]) - (now[1] - last[1])) > JUMP_S
        if jumped:
            self._stats.add("clock_jumps")
            logger.warning("prefix store: the clock jumped; this sweep removes nothing by age")
        return jumped

    def _count(self, result: Swept) -> None:
        for reason, count in result.removed.items():
            self._stats.add("evicted", count, reason=reason)
            self._stats.add("evicted_bytes", result.removed_bytes[reason], reason=reason)
        if result.garbage.objects:
            self._stats.add("evicted", result.garbage.objects, reason="garbage")


def sweep_quietly(sweeper: Sweeper, stats: StoreStats) -> Swept | None:
    """A pass whose failure is counted and logged, for a thread in the background."""
    try:
        return sweeper.sweep()
    except (StoreError, OSError) as error:
        stats.add("failures", op="sweep")
        logger.warning("prefix store: a sweep failed and is tried again later: %s", error)
        return None
