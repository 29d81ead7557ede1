"""The prompts of the benchmark: lengths drawn log-uniformly, the same for every setting of a round."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mix:
    """A kind of traffic.

    Attributes:
        name: in figures and charts.
        shortest, longest: of the prompts, in tokens.
    """

    name: str
    shortest: int
    longest: int

    def lengths(self, seed: int) -> Iterator[int]:
        """Prompt lengths without end. Equal shares of every doubling: as many of 100–200 as of 8k–16k."""
        rng = random.Random(f"{self.name} {seed}")
        while True:
            yield round(self.shortest * (self.longest / self.shortest) ** rng.random())

    def arrivals(self, seed: int, per_second: float, seconds: float) -> list[tuple[float, int]]:
        """(time in s, length) of a Poisson stream."""
        rng, lengths = random.Random(f"arrivals {seed}"), self.lengths(seed)
        found, now = [], rng.expovariate(per_second)
        while now < seconds:
            found.append((now, next(lengths)))
            now += rng.expovariate(per_second)
        return found

    def divided(self, by: int) -> Mix:
        """The same traffic of shorter prompts, for a model that this machine runs slowly."""
        return Mix(self.name, max(self.shortest // by, 1), self.longest // by)


SHORT = Mix("short", 100, 1_000)
MIXED = Mix("mixed", 100, 17_000)
LONG = Mix("long", 8_000, 20_000)
MIXES = (SHORT, MIXED, LONG)
