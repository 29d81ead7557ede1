"""Which runs of KV are worth storing.

A write costs disk, and room that evicts something else; a run that nobody asks for again pays nothing back.

| mode | stores a run |
|---|---|
| always | at its first sighting |
| second-sighting | when it was computed before and is computed again (a doorkeeper) |
| expected-reuse | at its first sighting where runs like it came back often enough, else at the second |

Agents come back with everything they said before plus a little: their first sighting is worth storing, and
waiting for the second costs every turn once more. One-off prompts never come back. `expected-reuse` learns
which is which, per traffic class and per kind of run: the first turn of a prompt, or the continuation of one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Mode(StrEnum):
    """When a run is stored."""

    ALWAYS = "always"
    SECOND_SIGHTING = "second-sighting"
    EXPECTED_REUSE = "expected-reuse"


@dataclass(frozen=True, slots=True)
class Rule:
    """What an operator sets.

    Attributes:
        mode: See the table above.
        min_tokens: Prompts below this are never stored.
        min_reuse: Under expected-reuse, the probability from which a first sighting is stored. A write pays
            when reuse × recompute time exceeds its own cost.
    """

    mode: Mode = Mode.ALWAYS
    min_tokens: int = 0
    min_reuse: float = 0.05

    def __post_init__(self) -> None:
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens is {self.min_tokens}; write 0 or more.")
        if not 0 <= self.min_reuse <= 1:
            raise ValueError(f"min_reuse is {self.min_reuse}; write 0 to 1.")


class Doorkeeper:
    """Remembers what was seen, in two generations of bounded size: the older half is forgotten at once.

    Args:
        capacity: Ids per generation, at least 1.
    """

    def __init__(self, capacity: int = 500_000) -> None:
        if capacity < 1:
            raise ValueError(f"a doorkeeper remembers at least one id, not {capacity}")
        self._capacity = capacity
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def seen(self, run: bytes) -> bool:
        """Whether the id was shown before; it is remembered now."""
        known = run in self._young or run in self._old
        self._young.add(run)
        if len(self._young) >= self._capacity:
            self._young, self._old = set(), self._young
        return known


@dataclass(slots=True)
class _Count:
    first: float = 0.0
    again: float = 0.0


@dataclass(slots=True)
class ReuseEstimate:
    """Probability that a run is asked for again, per (traffic class, continuation), from what was observed.

    Attributes:
        prior: Probability before anything was seen.
        weight: Observations that the prior is worth.
        horizon: After that many first sightings of a kind, both counts are halved: old traffic is forgotten.
    """

    prior: float = 0.5
    weight: float = 20.0
    horizon: float = 50_000.0
    _counts: dict[tuple[int, bool], _Count] = field(default_factory=dict)

    def first(self, code: int, continuation: bool) -> None:
        """A run of that kind was seen for the first time."""
        count = self._counts.setdefault((code, continuation), _Count())
        count.first += 1
        if count.first > self.horizon:
            count.first, count.again = count.first / 2, count.again / 2

    def again(self, code: int, continuation: bool) -> None:
        """A run that had been of that kind was asked for the second time."""
        count = self._counts.setdefault((code, continuation), _Count())
        count.again += 1

    def probability(self, code: int, continuation: bool) -> float:
        """Of being asked for again, 0 to 1."""
        count = self._counts.get((code, continuation), _Count())
        return min(1.0, (count.again + self.prior * self.weight) / (count.first + self.weight))


class Admission:
    """Applies a rule; one per engine.

    Args:
        rule: What the operator set.
        capacity: Runs that are remembered per generation.
    """

    def __init__(self, rule: Rule, capacity: int = 500_000) -> None:
        self.rule = rule
        self.estimate = ReuseEstimate()
        self._door = Doorkeeper(capacity)
        self._kinds: dict[bytes, tuple[int, bool]] = {}
        self._capacity = capacity

    def admit(self, run: bytes, code: int, continuation: bool, prompt_tokens: int) -> bool:
        """Whether a run that was just computed is to be stored.

        Args:
            run: Its id.
            code: Traffic class.
            continuation: Whether the prompt's beginning was found in a cache.
            prompt_tokens: Length of the whole prompt.
        """
        if prompt_tokens < self.rule.min_tokens:
            return False
        if self.rule.mode is Mode.ALWAYS:
            return True
        if self._door.seen(run):
            self.asked(run)
            return True
        if self.rule.mode is Mode.SECOND_SIGHTING:
            return False
        self.estimate.first(code, continuation)
        if len(self._kinds) >= 2 * self._capacity:
            self._kinds.clear()
        self._kinds[run] = (code, continuation)
        return self.estimate.probability(code, continuation) >= self.rule.min_reuse

    def asked(self, run: bytes) -> None:
        """A run was wanted again, whether it was found or not; teaches the estimate, once per run."""
        kind = self._kinds.pop(run, None)
        if kind is not None:
            self.estimate.again(*kind)
