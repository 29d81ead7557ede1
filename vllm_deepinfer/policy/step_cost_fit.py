"""Fit the coefficients of `StepCost` to measured steps: relative errors, robust, non-negative.

    minimise Σ w·((x·θ − y) / y)² + λ·Σ (sⱼ·(θⱼ − priorⱼ))²   over θ ≥ 0

- Errors are relative: a step of 10 ms counts as much as one of 500 ms.
- w falls with a sample's age, and with its residual (Huber), so that stalls and first runs count for little.
- The ridge holds a coefficient that these samples say nothing about at the value it had before. sⱼ is the
  column's mean share of a step, so λ means the same for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .non_negative import Vector, solve
from .step_cost import Features, StepCost
from .step_samples import Sample

COEFFICIENTS = (  # in the order of StepCost's own fields
    "per_step",
    "per_token",
    "per_pair",
    "per_decode",
    "per_decode_context",
    "per_prefill_context",
)
HALF_LIFE = 1_000  # steps after which a sample counts half
RIDGE = 1e-3
HUBER = 1.5  # residuals beyond this many robust standard deviations count linearly
LEAST_SCALE = 0.02  # no step repeats better than this
ITERATIONS = 6


def fit(samples: Sequence[Sample], prior: StepCost) -> StepCost:
    """The step cost that explains these samples best, with the prior's attention bound and tile.

    Raises:
        ValueError: No samples.
    """
    if not samples:
        raise ValueError("a step cost cannot be fitted to no samples.")
    seconds = np.array([sample.seconds for sample in samples])
    rows = np.array([row(sample.features, prior.tile) for sample in samples]) / seconds[:, None]
    newest = max(sample.number for sample in samples)
    age = np.array([newest - sample.number for sample in samples])
    weights = 0.5 ** (age / HALF_LIFE)
    start = np.array([getattr(prior, name) for name in COEFFICIENTS])
    theta = _robust(rows, weights, start)
    per_step, per_token, per_pair, per_decode, decode_context, prefill_context = map(float, theta)
    return StepCost(
        per_step,
        per_token,
        per_pair,
        per_decode,
        decode_context,
        prefill_context,
        prior.attention,
        prior.tile,
    )


def row(features: Features, tile: int) -> tuple[float, ...]:
    """What each of `COEFFICIENTS` is multiplied with."""
    return (
        1.0,
        math.ceil(features.tokens / tile) * tile,
        features.attended,
        features.decodes,
        features.decode_context,
        features.prefill_context,
    )


def _robust(rows: Vector, weights: Vector, prior: Vector) -> Vector:
    """Iteratively re-weighted non-negative least squares for rows·θ ≈ 1."""
    share = rows.mean(axis=0)
    share[share == 0] = 1.0
    scaled, centre = rows / share, prior * share  # in units of a step's duration
    influence = np.ones(len(rows))
    theta = centre
    for _ in range(ITERATIONS):
        heavy = weights * influence
        total = float(heavy.sum())
        gram = (scaled * heavy[:, None]).T @ scaled / total + RIDGE * np.eye(scaled.shape[1])
        moment = (scaled * heavy[:, None]).sum(axis=0) / total + RIDGE * centre
        theta = solve(gram, moment)
        residual = np.abs(scaled @ theta - 1.0)
        scale = max(1.4826 * _weighted_median(residual, weights), LEAST_SCALE)
        influence = np.minimum(1.0, HUBER * scale / np.maximum(residual, 1e-12))
    found: Vector = theta / share
    return found


def _weighted_median(values: Vector, weights: Vector) -> float:
    order = values.argsort()
    reached = weights[order].cumsum()
    return float(values[order][reached.searchsorted(reached[-1] / 2)])
