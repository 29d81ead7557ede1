"""The policies that are compared with ours, as pure choices among replicas that could take a request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from random import Random
from zlib import crc32

OURS = "ours"
OTHERS = ROUND_ROBIN, RANDOM, CONSISTENT_HASH, POWER_OF_TWO = (
    "round_robin",
    "random",
    "consistent_hash",
    "power_of_two",
)
POINTS = 160
"""Places of one replica on the hash ring: enough that an even load would be spread within about 8 %."""

Choose = Callable[[int, Sequence[str]], Sequence[str]]
"""What a request goes by (`Ticket.prefix`), names of replicas in any order → one of them, or two of which Ray
Serve takes the one with fewer requests."""


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._count = -1

    def __call__(self, prefix: int, names: Sequence[str]) -> Sequence[str]:
        """See `Choose`."""
        self._count += 1
        return [sorted(names)[self._count % len(names)]]


class Uniform:
    """Any, as likely as any other."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def __call__(self, prefix: int, names: Sequence[str]) -> Sequence[str]:
        """See `Choose`."""
        return [self._rng.choice(names)]


class ConsistentHash:
    """Prompts that begin alike go to the same replica, the next one on a ring of hashes."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._ring: list[tuple[int, str]] = []

    def __call__(self, prefix: int, names: Sequence[str]) -> Sequence[str]:
        """See `Choose`."""
        ordered = tuple(sorted(names))
        if ordered != self._names:
            self._names = ordered
            self._ring = sorted(
                (crc32(f"{name}#{point}".encode()), name) for name in ordered for point in range(POINTS)
            )
        place = crc32(prefix.to_bytes(8, "little"))
        return [self._ring[bisect_left(self._ring, (place, "")) % len(self._ring)][1]]


class PowerOfTwo:
    """Two at random: what Ray Serve's own router offers, and what it then does with them is Serve's."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def __call__(self, prefix: int, names: Sequence[str]) -> Sequence[str]:
        """See `Choose`."""
        return self._rng.sample(list(names), min(2, len(names)))


def others(rng: Random) -> dict[str, Choose]:
    """A fresh instance of each by name."""
    made = (RoundRobin(), Uniform(rng), ConsistentHash(), PowerOfTwo(rng))
    return dict(zip(OTHERS, made, strict=True))
