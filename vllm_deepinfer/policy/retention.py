"""How long a stored run of KV is kept, and what goes first when there is no room.

Every request belongs to a traffic class with a time to live and a share of the capacity. Expired runs go
first. Under pressure the least valuable run that nothing depends on goes next:

    value = expected reuse × seconds to recompute / bytes
    expected reuse = (1 + log2(1 + hits)) / (idle + 10 min)

A run is worth nothing without the runs before it, so a chain loses its end first, and a run that still has a
live run behind it stays. Classes that hold more than their share lose before the others do.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

DAY_S = 86_400.0
IDLE_OFFSET_S = 600.0


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """A kind of request.

    Attributes:
        name: What a request says, such as "agent".
        code: 0 to 99, what an object remembers; never given to another class of the same store.
        ttl_s: Seconds after its last use that a run is kept.
        share: Part of the capacity, 0 to 1, that the class may fill before it has to give way first.
    """

    name: str
    code: int
    ttl_s: float
    share: float

    def __post_init__(self) -> None:
        if not 0 <= self.code <= 99:
            raise ValueError(f"traffic class {self.name!r} has code {self.code}; write 0 to 99.")
        if not (math.isfinite(self.ttl_s) and self.ttl_s > 0):
            raise ValueError(f"traffic class {self.name!r} lives {self.ttl_s} s; write a positive number.")
        if not 0 <= self.share <= 1:
            raise ValueError(f"traffic class {self.name!r} has share {self.share}; write 0 to 1.")


DEFAULT_CLASSES = (
    TrafficClass("other", 0, 1 * DAY_S, 0.1),
    TrafficClass("agent", 1, 3 * DAY_S, 0.6),
    TrafficClass("chat", 2, 7 * DAY_S, 0.3),
)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a request's runs get: a class code and a time to live in seconds."""

    code: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Retention:
    """The classes of a store.

    Attributes:
        classes: Names and codes differ.
        default: The class of a request that names none.
        max_ttl_s: No request keeps anything longer than this.
    """

    classes: tuple[TrafficClass, ...] = DEFAULT_CLASSES
    default: str = "agent"
    max_ttl_s: float = 30 * DAY_S

    def __post_init__(self) -> None:
        for what, values in (
            ("name", [c.name for c in self.classes]),
            ("code", [c.code for c in self.classes]),
        ):
            if len(set(values)) != len(values):
                raise ValueError(f"two traffic classes have the same {what}: {values}.")
        if self.default not in {c.name for c in self.classes}:
            raise ValueError(f"the default traffic class {self.default!r} is none of {self.names()}.")

    def names(self) -> list[str]:
        """Names of the classes."""
        return [c.name for c in self.classes]

    def choose(self, name: str | None = None, ttl_s: float | None = None) -> Choice:
        """What a request gets that names a class, a time to live, both or nothing.

        Raises:
            ValueError: one sentence, for an unknown class or a time that is not positive.
        """
        wanted = self.default if name is None else name
        found = next((c for c in self.classes if c.name == wanted), None)
        if found is None:
            raise ValueError(f"the traffic class {wanted!r} is none of {', '.join(self.names())}.")
        if ttl_s is not None and not (math.isfinite(ttl_s) and ttl_s > 0):
            raise ValueError(f"a time to live of {ttl_s} seconds is not positive.")
        return Choice(found.code, min(found.ttl_s if ttl_s is None else ttl_s, self.max_ttl_s))

    def shares(self) -> dict[int, float]:
        """Share of the capacity per class code."""
        return {c.code: c.share for c in self.classes}


def retention_of(classes: Iterable[Mapping[str, Any]] | None, default: str | None) -> Retention:
    """Classes as they are written in a configuration; None: ours.

    Raises:
        ValueError, TypeError: a value that no class has, two alike, or a default that is none of them.
    """
    made = DEFAULT_CLASSES if classes is None else tuple(TrafficClass(**one) for one in classes)
    return Retention(made, "agent" if default is None else default)


@dataclass(frozen=True, slots=True)
class Recompute:
    """Cost of computing a token again: `1 + context / half_context`, in units of a token at context 0.

    `half_context` is where attention costs as much as everything else: some 65,536 tokens where a selection
    bounds attention, a tenth of that in a dense model. Only ratios matter here.
    """

    half_context: float = 65_536.0

    def cost(self, start: int, tokens: int) -> float:
        """Of `tokens` behind `start` others."""
        return tokens * (1.0 + (start + tokens / 2) / self.half_context)


@dataclass(frozen=True, slots=True)
class Held:
    """A stored run, as the policy sees it.

    Attributes:
        id: What its children carry as `parent`.
        parent: `id` of the run before it; of nothing that is stored for a first run.
        start: Tokens before it.
        tokens: Tokens in it.
        nbytes: What it takes.
        expires: Seconds on the clock of `now`.
        last_use: The same clock.
        hits: Times it was loaded.
        code: Its traffic class.
    """

    id: bytes
    parent: bytes
    start: int
    tokens: int
    nbytes: int
    expires: float
    last_use: float
    hits: int = 0
    code: int = 0


class Reason(StrEnum):
    """Why a run goes."""

    EXPIRED = "expired"
    UNREACHABLE = "unreachable"
    PRESSURE = "pressure"


@dataclass(frozen=True, slots=True)
class Removal:
    """One decision: an index into what was given to `plan`, and why."""

    index: int
    reason: Reason


def value(held: Held, now: float, recompute: Recompute) -> float:
    """Expected seconds of recomputation that a byte of the run saves, up to a constant factor."""
    idle = max(0.0, now - held.last_use)
    reuse = (1.0 + math.log2(1.0 + held.hits)) / (idle + IDLE_OFFSET_S)
    return reuse * recompute.cost(held.start, held.tokens) / max(1, held.nbytes)


@dataclass(slots=True)
class _State:
    held: Sequence[Held]
    parent: list[int | None]
    children: list[int]
    used: dict[int, int] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    removals: list[Removal] = field(default_factory=list)

    def remove(self, index: int, reason: Reason) -> int | None:
        """Take a run out; the parent's index if it has become the end of its chain."""
        run = self.held[index]
        self.gone.add(index)
        self.removals.append(Removal(index, reason))
        self.used[run.code] -= run.nbytes
        above = self.parent[index]
        if above is None:
            return None
        self.children[above] -= 1
        return above if not self.children[above] and above not in self.gone else None


def plan(
    held: Sequence[Held],
    now: float,
    capacity_bytes: int | None,
    retention: Retention,
    recompute: Recompute = Recompute(),
    low_water: float = 0.9,
) -> list[Removal]:
    """What has to go, in this order.

    Args:
        held: Everything that is stored.
        now: On the clock of `expires` and `last_use`.
        capacity_bytes: Above it, runs go until `low_water` of it is left; None for no bound.
        retention: The classes and their shares.
        recompute: What a run costs to compute again.
        low_water: Part of the capacity that is filled afterwards; the rest is room until the next sweep.
    """
    state = _state(held)
    _drop_expired(state, now)
    if capacity_bytes is None or sum(state.used.values()) <= capacity_bytes:
        return state.removals
    goal = low_water * capacity_bytes
    _drop_unreachable(state, goal)
    _drop_least_valuable(state, goal, now, capacity_bytes, retention.shares(), recompute)
    return state.removals


def _state(held: Sequence[Held]) -> _State:
    index = {run.id: i for i, run in enumerate(held)}
    parent = [index.get(run.parent) for run in held]
    parent = [None if p == i else p for i, p in enumerate(parent)]
    children = [0] * len(held)
    for above in parent:
        if above is not None:
            children[above] += 1
    state = _State(held, parent, children)
    for run in held:
        state.used[run.code] = state.used.get(run.code, 0) + run.nbytes
    return state


def _drop_expired(state: _State, now: float) -> None:
    """A run lives as long as the longest-lived run behind it."""
    lives = [run.expires for run in state.held]
    for i in sorted(range(len(lives)), key=lambda i: -state.held[i].start):
        above = state.parent[i]
        if above is not None:
            lives[above] = max(lives[above], lives[i])
    for i in sorted(range(len(lives)), key=lambda i: -state.held[i].start):
        if lives[i] <= now:
            state.remove(i, Reason.EXPIRED)


def _drop_unreachable(state: _State, goal: float) -> None:
    """Runs whose chain has a hole before them: no lookup finds them until it is filled."""
    reachable: dict[int, bool] = {}
    for i in sorted(range(len(state.held)), key=lambda i: state.held[i].start):
        above = state.parent[i]
        reachable[i] = state.held[i].start == 0 or (above is not None and reachable[above])
    for i in sorted(reachable, key=lambda i: -state.held[i].start):
        if sum(state.used.values()) <= goal:
            return
        if i not in state.gone and not reachable[i]:
            state.remove(i, Reason.UNREACHABLE)


def _drop_least_valuable(
    state: _State,
    goal: float,
    now: float,
    capacity_bytes: int,
    shares: dict[int, float],
    recompute: Recompute,
) -> None:
    ends: dict[int, list[tuple[float, int]]] = {}

    def add(indices: Iterable[int]) -> None:
        for i in indices:
            run = state.held[i]
            heapq.heappush(ends.setdefault(run.code, []), (value(run, now, recompute), i))

    add(i for i in range(len(state.held)) if i not in state.gone and not state.children[i])
    while sum(state.used.values()) > goal:
        full = [c for c in ends if ends[c] and state.used[c] > shares.get(c, 0.0) * capacity_bytes]
        candidates = full or [c for c in ends if ends[c]]
        if not candidates:
            return
        _, index = heapq.heappop(ends[min(candidates, key=lambda c: ends[c][0])])
        freed = state.remove(index, Reason.PRESSURE)
        if freed is not None:
            add([freed])
