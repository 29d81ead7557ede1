"""Drafts whose acceptance is known: which are right, and how likely that was, is written beforehand.

A token of a request is as hard to foresee as its place says, whatever was verified before: two settings that
come to the same place meet the same token.

    chance of draft k behind a request's first n tokens = sigmoid(level − slope · k + spread · noise(n + k))
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from vllm_deepinfer.policy.calibration import Vector, logit, sigmoid
from vllm_deepinfer.policy.verification_cost import Lengths

HEAT = 1.8  # a drafter that is too sure: its logits are this many times the true ones
LOGISTIC = math.pi / math.sqrt(3.0)  # deviation of the standard logistic distribution
EASY, HARD = 2.5, -1.0  # sigmoid: 0.92 and 0.27
VARIED = 0.5  # deviation between requests
SLOPE, SPREAD = 0.15, 0.8


class Confidences(StrEnum):
    """What a drafter says of its drafts."""

    RIGHT = "right"
    TOO_SURE = "too_sure"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Scripts:
    """Of some requests, by number.

    Attributes:
        levels: [requests] log odds of the first draft. seeds: [requests] of what chance decides.
        slope: log odds that each further draft loses. spread: between the tokens of a request.
    """

    levels: Vector
    seeds: NDArray[np.uint64]
    slope: float = SLOPE
    spread: float = SPREAD

    @classmethod
    def of(cls, traffic: str, count: int, seed: int) -> Scripts:
        """Requests of `easy` or `hard` traffic, or of `mixed`, where they take turns."""
        rng = random.Random(f"{traffic} {seed}")
        means = {"easy": (EASY,), "hard": (HARD,), "mixed": (EASY, HARD)}[traffic]
        levels = [rng.gauss(means[number % len(means)], VARIED) for number in range(count)]
        return cls(np.array(levels), np.array([rng.getrandbits(63) for _ in levels], np.uint64))

    @classmethod
    def steady(cls, levels: Sequence[float], slope: float, seed: int) -> Scripts:
        """Requests whose drafts have the same chances at every place."""
        seeds = np.array([seed * 1_000 + number for number in range(len(levels))], np.uint64)
        return cls(np.array(levels, np.float64), seeds, slope, 0.0)

    def chances(self, numbers: Lengths, known: Lengths, drafts: int) -> Vector:
        """[requests, drafts] probability that each draft is accepted if all before it are.

        Args:
            numbers: [requests]. known: [requests] tokens of each so far.
        """
        steps = np.arange(drafts)
        noise = logit(_uniform(self.seeds[numbers], known, drafts, 0)) / LOGISTIC
        return sigmoid(self.levels[numbers][:, None] - self.slope * steps + self.spread * noise)

    def right(self, numbers: Lengths, known: Lengths, drafts: int) -> NDArray[np.bool_]:
        """[requests, drafts] whether each draft is the token that the target writes there."""
        luck = _uniform(self.seeds[numbers], known, drafts, 1)
        found: NDArray[np.bool_] = luck < self.chances(numbers, known, drafts)
        return found

    def survivals(self, numbers: Lengths, known: Lengths, drafts: int) -> Vector:
        """[requests, drafts] probability that each draft and all before it are accepted."""
        survived: Vector = self.chances(numbers, known, drafts).cumprod(axis=1)
        return survived


def said(chances: Vector, confidences: Confidences) -> Vector | None:
    """The confidences that a drafter gives with drafts of these chances; None: none."""
    if confidences is Confidences.ABSENT:
        return None
    return chances if confidences is Confidences.RIGHT else sigmoid(HEAT * logit(chances))


def _uniform(seeds: NDArray[np.uint64], known: Lengths, drafts: int, salt: int) -> Vector:
    """[requests, drafts] in (0, 1), by seed and place alone: SplitMix64."""
    places = (known[:, None] + np.arange(drafts)).astype(np.uint64)
    with np.errstate(over="ignore"):
        mixed = seeds[:, None] + (places * np.uint64(2) + np.uint64(salt)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    found: Vector = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
    return found
