"""Fit Sequential Temperature Scaling to rounds of verification.

For each position in order: the temperature with the least survival ECE, those before it held. Of equal ones
the one nearest to 1. The whole is kept only where neither the mean nor the worst of the positions' errors is
above what it was without; else the identity is, so a fit is never worse on what it was fitted to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .calibration import Calibration, Vector, logit, sigmoid
from .calibration_errors import Errors, Records, ece, errors

GRID = tuple(float(each) for each in np.geomspace(0.25, 4.0, 161))
LEAST_ROUNDS = 200  # that verified a position, below which its temperature stays as it was


@dataclass(frozen=True, slots=True)
class Fit:
    """A calibration and what it is worth.

    Attributes:
        calibration: the identity where nothing better was found.
        before, after: errors on the records that it was fitted to.
    """

    calibration: Calibration
    before: Errors
    after: Errors


def fit(records: Records, *, near: Calibration | None = None, grid: tuple[float, ...] = GRID) -> Fit:
    """The temperatures that make survival come out right in these rounds.

    Args:
        near: search factors of `grid` around these instead of around 1, for positions with too few rounds
            keep these.
    """
    records = records.usable()
    positions = records.confidences.shape[1]
    start = near or Calibration.identity(positions)
    logits = logit(records.confidences)
    reached, survived = records.reached, records.survived
    before = errors(records.confidences, records)
    product = np.ones(len(logits))
    found = []
    for k, centre in enumerate(start.temperatures):
        rows = reached[:, k]
        best = centre
        if rows.sum() >= LEAST_ROUNDS:
            candidates = sorted({centre, 1.0, *(centre * each for each in grid)}, key=_from_one)
            scores = [
                ece(product[rows] * sigmoid(logits[rows, k] / each), survived[rows, k]) for each in candidates
            ]
            best = candidates[int(np.argmin(scores))]
        found.append(best)
        product = product * sigmoid(logits[:, k] / best)
    return better(Calibration(tuple(found)), records, before)


def cross_fit(fitting: Records, judging: Records) -> Fit:
    """Fitted to the one, judged by the other, whose errors are given; the identity where it were worse."""
    judging = judging.usable()
    return better(fit(fitting).calibration, judging, errors(judging.confidences, judging))


def better(calibration: Calibration, records: Records, before: Errors) -> Fit:
    """The calibration where it is nowhere worse on these records than none at all, else the identity."""
    after = errors(_applied(calibration, records), records)
    if after.mean_survival <= before.mean_survival and after.worst_survival <= before.worst_survival:
        return Fit(calibration, before, after)
    return Fit(Calibration.identity(len(calibration.temperatures)), before, before)


def _applied(calibration: Calibration, records: Records) -> Vector:
    """A temperature of 1 leaves a confidence exactly as it is, those at 0 and 1 included."""
    plain = np.array(calibration.temperatures) == 1.0
    return np.where(plain, records.confidences, calibration.apply(records.confidences))


def _from_one(temperature: float) -> float:
    return abs(float(np.log(temperature)))
