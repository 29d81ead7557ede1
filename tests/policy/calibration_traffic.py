"""Rounds of verification with known truth, for the tests of calibration."""

from __future__ import annotations

import numpy as np

from vllm_deepinfer.policy.calibration import logit, sigmoid
from vllm_deepinfer.policy.calibration_errors import Records


def verified_rounds(count: int, heat: float, seed: int, cut: float = 0.0, positions: int = 5) -> Records:
    """Rounds whose true acceptance is sigmoid(logit(confidence) / heat): `heat` > 1: the drafter is too sure.

    Args:
        cut: verification ends before the first draft whose survival, by the drafter's word, is below this.
    """
    random = np.random.default_rng(seed)
    confidences = random.beta(4, 1.3, (count, positions))
    accepts = random.random((count, positions)) < sigmoid(logit(confidences) / heat)
    verified = (np.cumprod(confidences, axis=1) >= cut).sum(axis=1)
    accepted = np.minimum(np.cumprod(accepts, axis=1).sum(axis=1), verified)
    return Records(confidences, verified, accepted)
