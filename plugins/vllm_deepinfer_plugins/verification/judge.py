"""Everything that the choice needs and vLLM does not know: confidences, their calibration, costs, counts.

With a confidence head the choice is the production form of DSpark: how many from confidences that are two
steps old, who gets them from those of now. A drafter without one gets confidences from how often its drafts
were accepted (`AcceptanceEstimator`), which know nothing of the drafts at hand: there no delay is needed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vllm_deepinfer.policy.calibration import Calibration, Vector
from vllm_deepinfer.policy.calibration_acceptance import AcceptanceEstimator
from vllm_deepinfer.policy.calibration_online import OnlineCalibration
from vllm_deepinfer.policy.step_cost import Features, StepCost
from vllm_deepinfer.policy.verification_control import Decision, Drafts, Reason, Rule, Verifier
from vllm_deepinfer.policy.verification_cost import NOTHING, RoundCost, RowResiduals
from vllm_deepinfer.policy.verification_pause import Pause

from .counts import VerificationCounts

logger = logging.getLogger(__name__)

PRODUCTION = Rule()

LOST = {
    Reason.NO_COST: "no usable cost of a step is known yet; it is learned from the first steps",
    Reason.NOT_A_NUMBER: "the drafter gave a confidence that is not a number: its weights are damaged",
    Reason.NO_HISTORY: "no confidences are old enough yet; they are after a few steps",
}


class Judge:
    """Chooses, and learns from what came of it.

    Attributes:
        counts: what it did.
        pause: whether anything is drafted; None for a drafter that cannot be told not to.
    """

    def __init__(
        self, positions: int, rule: Rule = PRODUCTION, calibration: Calibration | None = None
    ) -> None:
        """
        Args:
            positions: most drafts of a request.
            calibration: a saved one, for this target and drafter.
        """
        self.pause: Pause | None = None
        self._positions, self._rule = positions, rule
        self._headed = Verifier(rule)
        self._headless = Verifier(replace(rule, delay=0))
        self._calibration = OnlineCalibration(positions, calibration)
        self._estimator = AcceptanceEstimator(positions)
        self._residuals = RowResiduals()
        self._raw: dict[str, list[float]] = {}
        self._said: set[Reason] = set()
        self.counts = VerificationCounts()

    def drafted(self, key: str, confidences: Sequence[float]) -> None:
        """A request has new drafts, with as many confidences or none."""
        if confidences:
            self._raw[key] = list(confidences)
        else:
            self._raw.pop(key, None)

    def forget(self, key: str) -> None:
        """The request has ended."""
        self._raw.pop(key, None)
        self._estimator.forget(key)

    def choose(
        self,
        keys: Sequence[str],
        contexts: Sequence[int],
        drafted: Sequence[int],
        step: StepCost | None,
        others: Features = NOTHING,
        limit: float = math.inf,
        weight: float = 1.0,
    ) -> Decision:
        """How many drafts of each request the next step verifies; arguments as of `Verifier.decide`."""
        lengths = np.array(drafted, np.int64)
        headed = all(key in self._raw for key in keys)
        if headed:
            confidences = self._calibration.current.apply(self._matrix(keys))
        else:
            confidences = self._estimator.confidences(keys)
        drafts = Drafts(keys, np.array(contexts, np.float64), lengths, confidences)
        cost = None if step is None else RoundCost(replace(step, tile=1), residuals=self._residuals)
        verifier = self._headed if headed else self._headless
        decision = verifier.decide(drafts, cost, others, limit, weight)
        self.counts.decided(decision, lengths)
        if self.pause is not None and decision.tokens and decision.seconds and decision.plain:
            sure = round(len(keys) + others.decodes)
            self.pause.decided(sure, decision.plain, decision.tokens / decision.seconds)
        if decision.fallback and decision.reason not in self._said:
            self._said.add(decision.reason)
            logger.warning("All drafts are verified: %s.", LOST[decision.reason])
        return decision

    def verified(self, keys: Sequence[str], verified: Sequence[int], accepted: Sequence[int]) -> None:
        """Drafts of a step were accepted or rejected."""
        if not keys:
            return
        tried, good = np.array(verified, np.int64), np.array(accepted, np.int64)
        self.counts.add_lengths("verified", tried)
        self.counts.add_lengths("accepted", good)
        self._estimator.observe(keys, tried, good)
        known = np.array([key in self._raw for key in keys])
        if not known.any():
            return
        raw = self._matrix([key for key in keys if key in self._raw])
        before = self._calibration.refits
        self._calibration.observe(raw, tried[known], good[known])
        if self._calibration.refits != before:
            self._refitted()

    def took(self, rows: int, step: StepCost, features: Features, seconds: float) -> None:
        """A step without prefill has ended: what so many rows cost beyond the step cost."""
        self._residuals.observe(rows, replace(step, tile=1).seconds(features), seconds)

    def drafts(self, decodes: int) -> bool:
        """Whether the step that is about to be scheduled is to draft for the one behind it."""
        wanted = self.pause is None or self.pause.drafts(decodes)
        self.counts.add("paused", not wanted)
        return wanted

    def undrafted(self, rows: int, step: StepCost, features: Features, seconds: float) -> None:
        """A step without prefill that neither drafted nor verified has ended."""
        if self.pause is not None:
            expected = replace(step, tile=1).seconds(features)
            self.pause.took(rows, expected * (1.0 + float(self._residuals.at(np.array([rows]))[0])), seconds)

    def _refitted(self) -> None:
        found = self._calibration
        self.counts.totals |= {"refits": found.refits, "adopted": found.adopted}
        if found.before is not None and found.after is not None:
            self.counts.errors("ece_before", found.before)
            self.counts.errors("ece_after", found.after)

    def _matrix(self, keys: Sequence[str]) -> Vector:
        """[requests, positions] raw confidences, NaN where there is no draft."""
        matrix = np.full((len(keys), self._positions), np.nan)
        for row, key in enumerate(keys):
            own = self._raw[key]
            matrix[row, : len(own)] = own
        return matrix
