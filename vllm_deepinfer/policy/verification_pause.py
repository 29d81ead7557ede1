"""Whether the next step drafts at all: drafts that are dropped have cost their drafter's time all the same.

    rate without drafting = decodes / (share · seconds of a step that drafts and verifies nothing)

The share is learned from steps that did not draft, by number of decodes; a step cost is learned from those
that did. While nothing is drafted there are no confidences, so a pause ends by itself and is confirmed or
not: each that is confirmed is twice as long as the one before, up to a bound that keeps the looks cheap.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

LAST = 8  # steps that a share is the median of
NARROW = 4  # numbers of decodes within 2^(1/4) of each other are one; within twice they know of each other


@dataclass(frozen=True, slots=True)
class PauseRule:
    """When drafting stops, and for how long.

    Attributes:
        min_gain: predicted gain of not drafting from which drafting stops.
        votes: decisions in a row that must say so.
        first, longest: steps of a pause.
        tries: steps without drafts, from which a share is learned.
        unknown: steps of drafting from one try to the next, at least.
        stale: steps after which a share that is known is tried again.
    """

    min_gain: float = 0.02
    votes: int = 3
    first: int = 16
    longest: int = 128
    tries: int = 3
    unknown: int = 24
    stale: int = 4096

    def __post_init__(self) -> None:
        if not 0 <= self.min_gain < math.inf:
            raise ValueError(f"min_gain must be a finite number ≥ 0, got {self.min_gain}.")
        if min(self.votes, self.first, self.tries, self.unknown) < 1:
            raise ValueError("votes, first, tries and unknown are at least 1 step.")
        if self.longest < self.first or self.stale < self.unknown:
            raise ValueError("a pause's longest is at least its first, and stale is at least unknown.")


class Pause:
    """Says before each step whether it drafts."""

    def __init__(self, rule: PauseRule = PauseRule()) -> None:
        self._rule = rule
        self._shares: dict[int, deque[float]] = {}
        self._seen: dict[int, int] = {}  # step at which a share was last seen
        self._tried = 0  # step of the last try
        self._left = 0  # steps of the pause; 0: drafting
        self._size = rule.first  # of the next one
        self._votes = self._steps = 0
        self._at = -1

    def drafts(self, decodes: int) -> bool:
        """Whether the step that is about to be scheduled drafts for the one behind it.

        Args:
            decodes: requests that run.
        """
        at = _bucket(decodes)
        if at != self._at:  # another batch: what was found out does not hold
            self._at, self._left, self._size, self._votes = at, 0, self._rule.first, 0
        if self._left:
            self._left -= 1
            return False
        self._steps += 1
        known = self._known(at)
        stale = known is None or self._steps - self._seen[known] > self._rule.stale
        if stale and self._steps - self._tried > self._rule.unknown:
            self._tried = self._steps
            self._left = self._rule.tries - 1
            return False
        return True

    def decided(self, decodes: int, plain: float, rate: float) -> None:
        """How many drafts are verified was decided, with a prediction.

        Args:
            plain: seconds predicted for a step that drafts and verifies nothing.
            rate: tokens per second predicted for what was decided.
        """
        at = _bucket(decodes)
        known = self._known(at)
        if known is None or self._left or at != self._at:
            return
        without = decodes / (plain * median(self._shares[known]))
        if without <= rate * (1 + self._rule.min_gain):
            self._votes, self._size = 0, self._rule.first
            return
        self._votes += 1
        if self._votes >= self._rule.votes:
            self._left, self._votes = self._size, 0
            self._size = min(2 * self._size, self._rule.longest)

    def took(self, decodes: int, predicted: float, seconds: float) -> None:
        """A step that neither drafted nor verified has ended.

        Args:
            predicted: seconds, as for a step that drafts.
        """
        if not (0 < predicted < math.inf and 0 < seconds < math.inf):
            return
        at = _bucket(decodes)
        self._shares.setdefault(at, deque(maxlen=LAST)).append(seconds / predicted)
        self._seen[at] = self._steps

    def _known(self, at: int) -> int | None:
        """The nearest number of decodes, within twice, whose share is known."""
        near = min(self._shares, key=lambda other: abs(other - at), default=None)
        return near if near is not None and abs(near - at) <= NARROW else None


def _bucket(decodes: int) -> int:
    return round(NARROW * math.log2(max(decodes, 1)))
