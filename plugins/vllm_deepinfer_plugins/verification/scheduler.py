"""The scheduler of an engine that speculates and has no time budget.

vllm serve MODEL --speculative-config '{"method": "ngram", "num_speculative_tokens": 4}' \
    --scheduler-cls vllm_deepinfer_plugins.verification.scheduler.VerifyingScheduler
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.policy.step_cost import StepCost

from ..cli_errors import refuse
from ..replay.bounded import BoundedReplay
from .adaptive import AdaptiveVerification


class VerifyingScheduler(AdaptiveVerification, BoundedReplay, Scheduler):
    """For synchronous scheduling: ahead of time nobody knows confidences yet."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """As vLLM's. UserError: settings, or this class, do not fit."""
        try:
            if vllm_config.scheduler_config.async_scheduling:
                raise UserError(
                    "vLLM schedules asynchronously here, so VerifyingScheduler cannot be used: say "
                    "--no-async-scheduling"
                )
            super().__init__(vllm_config, *args, **kwargs)
        except UserError as error:
            refuse(error)

    def replay_cost(self) -> StepCost | None:
        """One cost of a step decides over drafts and over prefix hits."""
        return self._learner.cost() if self._learner.usable else None
