"""What the best choice by brute force would have brought, where acceptance and costs are known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from statistics import median

from vllm_deepinfer.policy.verification_cost import Vector

Trace = Sequence[tuple[float, Sequence[int]]]
"""Seconds of each step, and how many drafts of each request it verified."""


def costs(traces: Iterable[Trace]) -> dict[int, float]:
    """Median seconds of a step by the number of drafts that it verifies."""
    seen = defaultdict(list)
    for trace in traces:
        for seconds, lengths in trace:
            seen[sum(lengths)].append(seconds)
    return {slots: median(times) for slots, times in sorted(seen.items())}


def best(survived: Vector, seconds: Mapping[int, float]) -> tuple[float, tuple[int, ...]]:
    """The best tokens per second of all choices, every one of them tried, and the choice.

    Args:
        survived: [requests, drafts] probability that each draft and all before it are accepted.
        seconds: of a step by the number of drafts verified; choices of other numbers are left out.
    """
    choices = product(range(survived.shape[1] + 1), repeat=len(survived))
    return max(
        (_tokens(survived, lengths) / seconds[sum(lengths)], lengths)
        for lengths in choices
        if sum(lengths) in seconds
    )


def over_best(survived: Vector, seconds: Mapping[int, float], trace: Trace) -> float:
    """Tokens per second that the choices of a trace bring on average, over the best ones there are."""
    tokens = sum(_tokens(survived, lengths) for _, lengths in trace)
    taken = sum(seconds[sum(lengths)] for _, lengths in trace)
    return tokens / taken / best(survived, seconds)[0]


def _tokens(survived: Vector, lengths: Sequence[int]) -> float:
    pairs = zip(survived, lengths, strict=True)
    return len(lengths) + sum(float(row[:length].sum()) for row, length in pairs)
