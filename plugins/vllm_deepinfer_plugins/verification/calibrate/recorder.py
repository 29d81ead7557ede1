"""Sits where the judge sits, verifies everything, and writes down what came of it: nothing is censored."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vllm_deepinfer.policy.calibration import Vector
from vllm_deepinfer.policy.calibration_errors import Records
from vllm_deepinfer.policy.step_cost import Features, StepCost
from vllm_deepinfer.policy.verification_control import Decision, Reason
from vllm_deepinfer.policy.verification_cost import NOTHING

from ..judge import Judge


class Recorder(Judge):
    """Put it on a scheduler of `AdaptiveVerification` as its `judge`.

    Attributes:
        unsure: rounds of verification that came without confidences.
    """

    def __init__(self, positions: int) -> None:
        """
        Args:
            positions: most drafts of a request.
        """
        super().__init__(positions)
        self.unsure = 0
        self._keys: list[str] = []
        self._rounds: list[tuple[Vector, int, int]] = []

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
        """All of them."""
        return Decision(np.array(drafted, np.int64), Reason.SCHEDULED)

    def verified(self, keys: Sequence[str], verified: Sequence[int], accepted: Sequence[int]) -> None:
        """Drafts of a step were accepted or rejected."""
        for key, tried, good in zip(keys, verified, accepted, strict=True):
            if key not in self._raw:
                self.unsure += 1
            elif tried:
                self._keys.append(key)
                self._rounds.append((self._matrix([key])[0], tried, good))

    @property
    def rounds(self) -> int:
        """Rounds with confidences, so far."""
        return len(self._rounds)

    def records(self) -> tuple[list[str], Records]:
        """The request of each round, and the rounds."""
        confidences = np.array([each[0] for each in self._rounds]).reshape(-1, self._positions)
        verified = np.array([each[1] for each in self._rounds], np.int64)
        accepted = np.array([each[2] for each in self._rounds], np.int64)
        return list(self._keys), Records(confidences, verified, accepted)


def joined(parts: Sequence[tuple[list[str], Records]]) -> tuple[list[str], Records]:
    """Several recordings as one: the request of each round, and the rounds."""
    keys = [key for names, _ in parts for key in names]
    records = [each for _, each in parts]
    return keys, Records(
        np.concatenate([each.confidences for each in records]),
        np.concatenate([each.verified for each in records]),
        np.concatenate([each.accepted for each in records]),
    )
