"""Reads the saved fit at start-up and writes new ones now and then."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from vllm_deepinfer.policy.step_cost import StepCost
from vllm_deepinfer.policy.step_cost_learner import StepCostLearner

from . import saved_fit

SAVE_EVERY = 60.0  # seconds


class FitKeeper:
    """One file, for one model and machine."""

    def __init__(self, path: str | None, vllm_config: Any) -> None:
        """
        Args:
            path: of the file; None: one in vLLM's cache folder that nothing else uses.
        """
        self._fingerprint = saved_fit.fingerprint_of(vllm_config)
        self._path = Path(path) if path else saved_fit.default_path(self._fingerprint)
        self._saved_at, self._saved_refits, self._writable = -math.inf, 0, True

    def read(self, empty: StepCost) -> StepCost | None:
        """The saved fit, unless it counts tokens in other tiles or bounds attention otherwise."""
        known = saved_fit.read(self._path, self._fingerprint)
        if known is None or (known.attention, known.tile) != (empty.attention, empty.tile):
            return None
        return known

    def offer(self, learner: StepCostLearner, now: float) -> None:
        """Save the fit if it is new and the last was saved a while ago."""
        new = learner.usable and learner.refits > self._saved_refits
        if new and self._writable and now - self._saved_at >= SAVE_EVERY:
            self._writable = saved_fit.write(self._path, learner.fitted, self._fingerprint)
            self._saved_at, self._saved_refits = now, learner.refits
