"""What steps cost, learned from the steps themselves where no time-budget scheduler learns it already."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request

from vllm_deepinfer.policy.itl_control import ItlControl
from vllm_deepinfer.policy.step_cost import Features, StepCost, Work
from vllm_deepinfer.policy.step_cost_learner import StepCostLearner

from ..scheduler.attention import empty_cost
from ..scheduler.fit_keeper import FitKeeper
from ..scheduler.meter import Meter, Record
from ..settings import Settings

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as Behind
else:
    Behind = object


class Measured(Behind):
    """Mixin in front of `BoundedReplay`: its `replay_cost`, read from and kept in the time budget's file."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        settings = Settings.read(vllm_config.additional_config)
        empty = empty_cost(settings, vllm_config, kv_cache_config)
        self._keeper = FitKeeper(settings.step_cost_file, vllm_config)
        self._learner = StepCostLearner(empty, self._keeper.read(empty))
        self._meter = Meter(self._learner, ItlControl())
        self._clock = time.perf_counter

    def replay_cost(self) -> StepCost | None:
        return self._learner.cost() if self._learner.usable else None

    def schedule(self, throttle_prefills: bool = False) -> Any:
        output = super().schedule(throttle_prefills)
        if self.prefix_replay_tokens and output.num_scheduled_tokens:
            self._meter.began(id(output), self._step(output))
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        finished = self._meter.ended(id(scheduler_output), self._clock())
        if finished is not None and finished.refitted:
            self._keeper.offer(self._learner, self._clock())
        return super().update_from_output(scheduler_output, model_runner_output)

    def shutdown(self) -> None:
        self._keeper.offer(self._learner, math.inf)
        super().shutdown()

    def _step(self, output: Any) -> Record:
        """What a step computes; vLLM has added its tokens to what is computed already."""
        cost, features, chunks = self._learner.fitted, Features(), []
        for key, count in output.num_scheduled_tokens.items():
            request: Request = self.requests[key]
            context = request.num_computed_tokens - count
            if context + count <= request.num_prompt_tokens or count > 1 + self.num_spec_tokens:
                chunks.append(count)
                features = features + cost.features(Work(context, prefill_tokens=count))
            else:
                features = features + cost.features(Work(context, draft_tokens=count - 1))
        plain = not output.scheduled_encoder_inputs and not output.has_sync_kv_loads
        return Record(self._clock(), features, 0.0, math.inf, int(features.decodes), chunks, plain)
