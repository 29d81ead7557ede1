"""Which prefill worker and which decode worker takes a request.

Prefill goes to the least predicted outstanding work, whatever is cached where: prefixes lie in a store that
all workers share, so any free worker will do (DeepInfer's answers, October 2026). Decode goes where the next
step stays shortest, by active requests and KV tokens, and never beyond a worker's capacity; a conversation
returns to no particular worker.

Workers push their loads. Between two pushes the router counts what it has assigned itself (`Ledger`), or
every request between them would go to the same worker. A load older than `Staleness.after_s` is stale: its
worker comes after all fresh ones, ranked by the ledger, and the choice says so, to be counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """What a prefill worker says of itself.

    Attributes:
        outstanding_s: predicted seconds of prefill that it holds, running and waiting.
        at: when it said so, in seconds of the router's clock.
        accepted: the largest assignment number (`Ledger.assign`) among the requests counted in it.
    """

    outstanding_s: float
    at: float
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """What a decode worker says of itself.

    Attributes:
        active: requests that it decodes or holds KV for.
        kv_tokens: tokens of KV that they occupy.
        most_active, most_kv_tokens: its capacity.
        at, accepted: as in `PrefillLoad`.
    """

    active: int
    kv_tokens: int
    most_active: int
    most_kv_tokens: int
    at: float
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds that one request, and one token of context, add to a decode step (StepCost's d and e)."""

    per_request: float
    per_kv_token: float

    def __post_init__(self) -> None:
        for name, value in (("per_request", self.per_request), ("per_kv_token", self.per_kv_token)):
            if not 0 <= value < math.inf:
                raise ValueError(f"the decode cost's {name} must be a finite number ≥ 0, got {value}.")
        if self.per_request == self.per_kv_token == 0:
            raise ValueError(
                "the decode cost is zero, so all workers would look the same: give one of its parts."
            )


@dataclass(frozen=True, slots=True)
class Assigned:
    """One request on its way to a worker.

    Attributes:
        number: counts the router's assignments, from 1.
        at: when, in seconds of the router's clock.
        prefill_s: predicted seconds of its prefill; 0 for a decode.
        kv_tokens: KV that its decode will occupy; 0 for a prefill.
    """

    number: int
    at: float
    prefill_s: float = 0.0
    kv_tokens: int = 0


@dataclass(slots=True)
class Ledger:
    """What a router has assigned to each worker and no load counts yet. The caller gives the time.

    A worker echoes the number of the newest assignment that its load counts; these are then settled. An
    assignment that never arrives (its request failed on the way) is settled by `forget`, or by age.
    """

    lost_after_s: float = 30.0
    _number: int = 0
    _open: dict[str, list[Assigned]] = field(default_factory=dict)

    def assign(self, worker: str, at: float, *, prefill_s: float = 0.0, kv_tokens: int = 0) -> Assigned:
        """Note an assignment; its number travels with the request."""
        self._number += 1
        made = Assigned(self._number, at, prefill_s, kv_tokens)
        self._open.setdefault(worker, []).append(made)
        return made

    def settle(self, worker: str, accepted: int) -> None:
        """A load of the worker counts all assignments up to that number."""
        self._keep(worker, lambda one: one.number > accepted)

    def forget(self, worker: str, number: int) -> None:
        """The request of that assignment ended or failed."""
        self._keep(worker, lambda one: one.number != number)

    def drop(self, worker: str) -> None:
        """The worker is gone."""
        self._open.pop(worker, None)

    def open(self, worker: str, now: float) -> Sequence[Assigned]:
        """What is on its way to the worker; assignments older than `lost_after_s` are given up."""
        self._keep(worker, lambda one: now - one.at <= self.lost_after_s)
        return tuple(self._open.get(worker, ()))

    def _keep(self, worker: str, wanted: Callable[[Assigned], bool]) -> None:
        kept = [one for one in self._open.get(worker, ()) if wanted(one)]
        if kept:
            self._open[worker] = kept
        else:
            self._open.pop(worker, None)


@dataclass(frozen=True, slots=True)
class Staleness:
    """When a load is too old to compare with fresh ones."""

    after_s: float = 2.0

    def stale(self, at: float, now: float) -> bool:
        """Whether a load of that time is stale now. One from the future (another clock) is not."""
        return now - at > self.after_s


@dataclass(frozen=True, slots=True)
class Choice:
    """A routing decision.

    Attributes:
        worker: the one that takes the request.
        cost_s: what the decision went by: predicted seconds until the prefill is done, or of a decode step.
        stale: its load was stale, so only what the router itself had assigned spoke for it.
        marked: every worker was marked overloaded and the marks were not heeded.
    """

    worker: str
    cost_s: float
    stale: bool = False
    marked: bool = False


class Marks:
    """Workers that refused a request not long ago.

    A mark expires by itself: a worker that is never asked again could not show that it is well.

    Args:
        for_s: How long a mark lasts.
    """

    def __init__(self, for_s: float = 1.0) -> None:
        if not 0 < for_s < math.inf:
            raise ValueError(f"an overload mark must last a finite time above 0 s, got {for_s}.")
        self._for_s = for_s
        self._until: dict[str, float] = {}

    def mark(self, worker: str, now: float) -> None:
        """The worker refused a request for overload."""
        self._until[worker] = now + self._for_s

    def clear(self, worker: str) -> None:
        """The worker took a request, or is gone."""
        self._until.pop(worker, None)

    def marked(self, now: float) -> frozenset[str]:
        """The workers whose marks have not expired."""
        self._until = {worker: until for worker, until in self._until.items() if until > now}
        return frozenset(self._until)


def choose_prefill(
    loads: Mapping[str, PrefillLoad],
    seconds: Mapping[str, float] | float,
    ledger: Ledger,
    now: float,
    *,
    marked: frozenset[str] = frozenset(),
    staleness: Staleness = Staleness(),
) -> Choice | None:
    """The worker that will have finished this prefill first.

    Args:
        loads: The newest load of each worker.
        seconds: The request's predicted prefill, in seconds; per worker where they differ in speed.
        marked: Workers that refused not long ago; they come last.

    Returns:
        None without any worker.
    """
    ranked = []
    for worker, load in loads.items():
        stale = staleness.stale(load.at, now)
        coming = ledger.open(worker, now)
        # One that has fallen silent is not known to have done any of it.
        held = sum(one.prefill_s for one in coming) if stale else _backlog(load, coming, now)
        own = seconds if isinstance(seconds, (int, float)) else seconds[worker]
        ranked.append((worker in marked, stale, held + own, worker))
    return _first(ranked, all_marked=bool(loads) and marked.issuperset(loads))


def choose_decode(
    loads: Mapping[str, DecodeLoad],
    kv_tokens: int,
    cost: DecodeCost,
    ledger: Ledger,
    now: float,
    *,
    marked: frozenset[str] = frozenset(),
    staleness: Staleness = Staleness(),
) -> Choice | None:
    """The worker whose next step stays shortest with the request in it, among those that have room.

    Args:
        loads: The newest load of each worker.
        kv_tokens: What the request needs: its context, and what the caller reserves for its output.
        marked: Workers that refused not long ago; they come last.

    Returns:
        None when no worker has room: the request waits, or is refused.
    """
    ranked, roomy = [], []
    for worker, load in loads.items():
        coming = ledger.open(worker, now)
        active = load.active + len(coming) + 1
        tokens = load.kv_tokens + sum(one.kv_tokens for one in coming) + kv_tokens
        if active > load.most_active or tokens > load.most_kv_tokens:
            continue
        roomy.append(worker)
        seconds = cost.per_request * active + cost.per_kv_token * tokens
        ranked.append((worker in marked, staleness.stale(load.at, now), seconds, worker))
    return _first(ranked, all_marked=bool(roomy) and marked.issuperset(roomy))


def choose_aggregated(
    prefill: Mapping[str, PrefillLoad],
    decode: Mapping[str, DecodeLoad],
    seconds: float,
    kv_tokens: int,
    cost: DecodeCost,
    ledger: Ledger,
    now: float,
    *,
    marked: frozenset[str] = frozenset(),
    staleness: Staleness = Staleness(),
) -> Choice | None:
    """For workers that do both: the soonest first token, then the shortest step, among those that have room.

    Arguments as of `choose_prefill` and `choose_decode`; both mappings have the same workers.
    """
    ranked, roomy = [], []
    for worker in decode:
        step = choose_decode({worker: decode[worker]}, kv_tokens, cost, ledger, now, staleness=staleness)
        first = choose_prefill({worker: prefill[worker]}, seconds, ledger, now, staleness=staleness)
        if step is not None and first is not None:
            roomy.append(worker)
            ranked.append((worker in marked, first.stale or step.stale, first.cost_s + step.cost_s, worker))
    return _first(ranked, all_marked=bool(roomy) and marked.issuperset(roomy))


def _backlog(load: PrefillLoad, coming: Sequence[Assigned], now: float) -> float:
    """Seconds of work left now: a worker does a second of it per second, and none before it has arrived."""
    left, at = load.outstanding_s, load.at
    for one in coming:
        left, at = max(left - max(one.at - at, 0.0), 0.0) + one.prefill_s, max(one.at, at)
    return max(left - max(now - at, 0.0), 0.0)


def _first(ranked: Iterable[tuple[bool, bool, float, str]], *, all_marked: bool) -> Choice | None:
    """The least of (marked, stale, seconds, name); the name only makes ties repeatable."""
    best = min(ranked, default=None)
    if best is None:
        return None
    return Choice(worker=best[3], cost_s=best[2], stale=best[1], marked=all_marked)
