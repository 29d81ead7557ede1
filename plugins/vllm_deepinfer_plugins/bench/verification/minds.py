"""Puts a setting into a running engine: its scheduler, how much is drafted, and what chooses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_deepinfer.policy.step_cost import Features, StepCost
from vllm_deepinfer.policy.verification_control import Decision, Reason
from vllm_deepinfer.policy.verification_cost import NOTHING

from ...scheduler.bench.swap import swap
from ...verification.calibrate.recorder import Recorder
from ...verification.judge import Judge
from ...verification.scheduler import VerifyingScheduler
from .plan import NO_REPLAY, OFF, SAYS
from .script import Confidences


class Pinned(Judge):
    """Verifies so many drafts in all, the first drafts of all requests before the second ones."""

    def __init__(self, positions: int, slots: int) -> None:
        super().__init__(positions)
        self._slots = slots

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
        """As said."""
        lengths = np.zeros(len(keys), np.int64)
        places = [(j, row) for row, most in enumerate(drafted) for j in range(most)]
        for _, row in sorted(places)[: self._slots]:
            lengths[row] += 1
        return Decision(lengths, Reason.SCHEDULED)


class Minds:
    """What adaptive verification has learned is kept from slice to slice: a server in use, not a fresh one.

    Attributes:
        recorder: of the setting `record`, the last one.
    """

    def __init__(self, engine: Any) -> None:
        self._core = engine.engine_core.engine_core
        self._proposer = engine.model_executor.driver_worker.worker.model_runner.drafter
        self._most: int = engine.vllm_config.speculative_config.num_speculative_tokens
        self._known: dict[str, tuple[Judge, Any]] = {}
        self.recorder: Recorder | None = None

    @property
    def proposer(self) -> Any:
        """What vLLM's runner calls."""
        return self._proposer

    def put_in(
        self, setting: str, confidences: Confidences = Confidences.RIGHT, at_once: int | None = None
    ) -> Any:
        """Returns the scheduler that is in place now.

        Args:
            setting: `off`, `fixed 3`: vLLM's own scheduler; a key of `SAYS`: adaptive; `pinned 7`;
                `record`, with these confidences.
            at_once: requests that run at a time; None: as many as the engine was started for.
        """
        limits: dict[str, Any] = {} if at_once is None else {"max_num_seqs": at_once}
        kind, _, number = setting.partition(" ")
        self._proposer.drafting = setting != OFF
        self._proposer.count = int(number) if kind == "fixed" else self._most
        self._proposer.confidences = SAYS.get(setting, confidences)
        if setting == OFF or kind == "fixed":
            return swap(self._core, Scheduler, deepinfer=NO_REPLAY, **limits)
        scheduler = swap(self._core, VerifyingScheduler, deepinfer=NO_REPLAY, **limits)
        if setting in SAYS:
            learned = self._known.setdefault(setting, (scheduler.judge, scheduler._learner))
            scheduler.judge, scheduler._learner = learned
        elif kind == "pinned":
            scheduler.judge = Pinned(self._most, int(number))
        else:
            assert kind == "record", setting
            scheduler.judge = self.recorder = Recorder(self._most)
        return scheduler
