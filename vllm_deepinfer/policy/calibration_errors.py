"""How far confidences are from what happened: expected calibration errors (ECE), per position.

A position counts only in rounds that verified it. What was not verified is censored, and so is its failure:
"the first draft was rejected, so the third would not have survived" is true, but rounds that were cut short
and *accepted* say nothing about the third, and keeping only the bad news would make every confidence look too
high. How deep a round went was decided by confidences, so within a bin of them those kept are like the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .calibration import Vector

BINS = 20  # of equal width, as the paper's evaluator has them

Lengths = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Records:
    """Rounds of verification, one row each.

    Attributes:
        confidences: [n, positions] as the drafter gave them.
        verified: [n] drafts that were verified.
        accepted: [n] of these, those that were accepted.
    """

    confidences: Vector
    verified: Lengths
    accepted: Lengths

    def __post_init__(self) -> None:
        rows, positions = self.confidences.shape
        if self.verified.shape != (rows,) or self.accepted.shape != (rows,):
            raise ValueError(f"{rows} rounds of confidences need as many counts.")
        if ((self.accepted < 0) | (self.accepted > self.verified) | (self.verified > positions)).any():
            raise ValueError("a round accepts from 0 to all of the drafts that it verified.")

    def usable(self) -> Records:
        """Those whose confidences are numbers wherever they were verified."""
        broken: NDArray[np.bool_] = np.logical_or.reduce(np.isnan(self.confidences) & self.reached, axis=1)
        return self.where(~broken)

    def where(self, rows: NDArray[np.bool_]) -> Records:
        """Some of the rounds."""
        return Records(self.confidences[rows], self.verified[rows], self.accepted[rows])

    @property
    def reached(self) -> NDArray[np.bool_]:
        """[n, positions] whether it was verified."""
        return np.arange(self.confidences.shape[1]) < self.verified[:, None]

    @property
    def survived(self) -> NDArray[np.bool_]:
        """[n, positions] whether the draft and all before it were accepted."""
        return np.arange(self.confidences.shape[1]) < self.accepted[:, None]


@dataclass(frozen=True, slots=True)
class Errors:
    """ECE per position, each in [0, 1]; NaN where nothing was verified.

    Attributes:
        position: of each confidence by itself, where all before it were accepted.
        survival: of the products up to each position.
        counts: rounds that verified each position.
    """

    position: tuple[float, ...]
    survival: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def mean_survival(self) -> float:
        """Over positions, by how often each was verified; 0.0 without any."""
        pairs = [(e, n) for e, n in zip(self.survival, self.counts, strict=True) if n]
        return sum(e * n for e, n in pairs) / sum(n for _, n in pairs) if pairs else 0.0

    @property
    def worst_survival(self) -> float:
        """Of the positions; 0.0 without any."""
        return max((e for e, n in zip(self.survival, self.counts, strict=True) if n), default=0.0)


def errors(confidences: Vector, records: Records) -> Errors:
    """The errors that these confidences would have had in these rounds.

    Args:
        confidences: [n, positions], such as calibrated ones of the records' own.
    """
    reached, survived = records.reached, records.survived
    products = np.cumprod(np.where(reached, confidences, 1.0), axis=1)
    tried = reached & (np.arange(reached.shape[1]) <= records.accepted[:, None])
    position, survival = [], []
    for k in range(reached.shape[1]):
        own, joint = tried[:, k], reached[:, k]
        position.append(ece(confidences[own, k], survived[own, k]))
        survival.append(ece(products[joint, k], survived[joint, k]))
    return Errors(tuple(position), tuple(survival), tuple(int(n) for n in reached.sum(axis=0)))


def ece(predicted: Vector, happened: NDArray[np.bool_]) -> float:
    """Σ over bins of (share of the samples) · |mean prediction − frequency|; NaN without samples."""
    if not len(predicted):
        return float("nan")
    bins = np.minimum((predicted * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(bins, weights=predicted - happened, minlength=BINS)
    return float(np.abs(gaps).sum() / len(predicted))
