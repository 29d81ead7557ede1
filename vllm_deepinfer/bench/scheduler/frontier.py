"""The best that stock reaches at a given p99 ITL: what a ratio "at equal p99 ITL" divides by."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """(p99, throughput) of the settings that no other beats in both, by rising p99."""
    best: list[tuple[float, float]] = []
    for p99, throughput in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or throughput > best[-1][1]:
            best.append((p99, throughput))
    return best


def at(points: Iterable[tuple[float, float]], p99: float) -> float | None:
    """Throughput at this p99, between two settings on the logarithm of p99: as if chunks had every size.

    Above the largest p99 that any setting reaches, the largest throughput. Below the smallest, None, but for
    3 %: p99s that close are the same.
    """
    best = frontier(points)
    if not best or p99 < 0.97 * best[0][0]:
        return None
    p99 = max(p99, best[0][0])
    for (low, less), (high, more) in pairwise(best):
        if p99 < high:
            share = math.log(p99 / low) / math.log(high / low)
            return less + share * (more - less)
    return best[-1][1]
