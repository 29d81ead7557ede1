"""Least squares with coefficients ≥ 0, from the normal equations (Lawson and Hanson 1974, in Bro's form)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def solve(gram: Vector, moment: Vector) -> Vector:
    """argmin over θ ≥ 0 of θᵀ·gram·θ / 2 − momentᵀ·θ.

    Args:
        gram: AᵀA, [k, k], positive definite (a ridge makes it so).
        moment: Aᵀy, [k].

    Returns:
        θ, [k], every entry ≥ 0 and not −0.
    """
    size = len(moment)
    theta = np.zeros(size)
    free = np.zeros(size, dtype=bool)
    tolerance = 1e-12 * max(1.0, float(np.abs(moment).max(initial=0.0)))
    for _ in range(3 * size):  # each pass frees one entry; cycling would need exact ties
        gradient = moment - gram @ theta
        gradient[free] = -np.inf
        candidate = int(gradient.argmax())
        if gradient[candidate] <= tolerance:
            break
        free[candidate] = True
        theta = _settle(gram, moment, theta, free)
    return np.maximum(theta, 0.0)


def _settle(gram: Vector, moment: Vector, theta: Vector, free: NDArray[np.bool_]) -> Vector:
    """Minimise over the free entries; those that would turn negative are fixed at 0, one after another."""
    while True:
        target = np.zeros_like(theta)
        target[free] = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
        negative = free & (target < 0)
        if not negative.any():
            return target
        steps = theta[negative] / (theta[negative] - target[negative])
        theta = theta + float(steps.min()) * (target - theta)
        free &= theta > 1e-15 * max(1.0, float(theta.max()))
        theta[~free] = 0.0
