"""What the schedulers add to vLLM's: drafts that are not worth their time are dropped before a step.

The choice is made here, in the one scheduler of an engine, so all ranks see the same. It is complete before
vLLM's own loops begin: to them a request just has fewer drafts.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from vllm_deepinfer.policy.step_cost import Features, Work
from vllm_deepinfer.policy.step_cost_learner import StepCostLearner
from vllm_deepinfer.policy.verification_control import Decision
from vllm_deepinfer.policy.verification_pause import Pause

from ..draft.settle import uses_dspark
from ..settings import Settings
from .judge import Judge
from .saved import calibration_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as Behind
    from vllm.v1.request import Request
else:
    Behind = object


class AdaptiveVerification(Behind):
    """Mixin in front of vLLM's Scheduler, or of `TimeBudget`, whose cost model and budget it then shares.

    Attributes:
        judge: Makes the choice; None without speculation, or where everything is to be verified.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        from ..scheduler.attention import empty_cost  # whose package imports this module

        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        settings = Settings.read(vllm_config.additional_config)
        self.judge: Judge | None = None
        if self.num_spec_tokens and settings.verification == "adaptive":
            self.judge = Judge(
                self.num_spec_tokens, calibration=calibration_of(vllm_config, settings, self.num_spec_tokens)
            )
        self._own_costs = not hasattr(self, "_learner")
        if self._own_costs:
            # With a budget the cost is the planner's too, and is to be of steps that draft.
            if self.judge is not None and uses_dspark(vllm_config):
                self.judge.pause = Pause()
            self._learner = StepCostLearner(empty_cost(settings, vllm_config, kv_cache_config))
        self._clock = getattr(self, "_clock", time.perf_counter)
        self._choice: Decision | None = None
        self._drafted = self._drafting = False  # in the step before, in this one
        self._under_way: tuple[int, float, Features, bool] | None = None

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        if self.judge is not None:
            for key, tokens in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
                self.judge.drafted(key, getattr(tokens, "confidences", ()))
        super().update_draft_token_ids(draft_token_ids)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        if self.judge is not None:
            self._choice = self._trim(self.judge)
        output = super().schedule(throttle_prefills)
        if self.judge is not None and output.num_scheduled_tokens:
            self._drafted, self._drafting = self._drafting, self.judge.drafts(len(self.running))
            if not self._drafting:
                output.num_spec_tokens_to_schedule = 0  # heard by `draft.worker`
        if output.num_scheduled_tokens and (self.judge is not None or self._own_costs):
            features, prefill = self._features(output)
            self._under_way = (id(output), self._clock(), features, prefill)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        seconds = self._ended(scheduler_output)
        if self.judge is not None:
            tokens = self._accepted(self.judge, scheduler_output, model_runner_output)
            if seconds is not None and self._choice is not None:
                self.judge.counts.measured(self._choice, tokens, seconds)
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self.judge is not None:
            self.judge.counts.put_into(stats)
        return stats

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if self.judge is not None:
            self.judge.forget(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def verification_limit(self) -> float:
        """Seconds that decodes with drafts may take in the next step; infinite where nobody set a budget."""
        planner = getattr(self, "_planner", None)
        return math.inf if planner is None else float(planner.decodes_limit())

    def prefill_weight(self) -> float:
        """What a second of prefill is worth beside one of decoding; 1 where nobody set a budget."""
        planner = getattr(self, "_planner", None)
        return 1.0 if planner is None else float(planner.prefill_weight())

    def _trim(self, judge: Judge) -> Decision | None:
        drafting = [request for request in self.running if request.spec_token_ids]
        if not drafting:
            return None
        decision = judge.choose(
            [request.request_id for request in drafting],
            [request.num_computed_tokens for request in drafting],
            [len(request.spec_token_ids) for request in drafting],
            self._learner.cost() if self._learner.usable else None,
            self._others(drafting),
            self.verification_limit(),
            self.prefill_weight(),
        )
        for request, length in zip(drafting, decision.lengths.tolist(), strict=True):
            request.spec_token_ids = request.spec_token_ids[:length]
        return decision

    def _others(self, drafting: list[Request]) -> Features:
        """What shares the step with the drafts: decodes without any, and the prefill that waits.

        With a budget prefill gets what drafts leave: nothing of it is there yet that they would have to fit.
        """
        plain = prefill = 0
        context = 0.0
        for request in self.running:
            left = request.num_tokens - request.num_computed_tokens
            if left > 1:
                prefill += left
            elif not request.spec_token_ids:
                plain += 1
                context += request.num_computed_tokens
        if not self._own_costs:
            return Features(decodes=plain, decode_context=context)
        if len(self.running) < self.max_num_running_reqs:
            prefill += sum(request.num_tokens for request, _ in zip(self.waiting, range(8), strict=False))
        room = max(self.max_num_scheduled_tokens - len(drafting) - plain, 0)
        return Features(tokens=min(prefill, room), decodes=plain, decode_context=context)

    def _features(self, output: Any) -> tuple[Features, bool]:
        """What a step computes, and whether there is prefill in it; vLLM has counted its tokens already."""
        cost, features, prefill = self._learner.fitted, Features(), False
        drafts = output.scheduled_spec_decode_tokens
        for key, count in output.num_scheduled_tokens.items():
            context = self.requests[key].num_computed_tokens - count
            verified = len(drafts.get(key, ()))
            if count > 1 + verified:
                prefill = True
                features = features + cost.features(Work(context, prefill_tokens=count))
            else:
                features = features + cost.features(Work(context, draft_tokens=verified))
        return features, prefill

    def _ended(self, output: Any) -> float | None:
        """Seconds of the step, if it was one without prefill: learn what it cost."""
        step, self._under_way = self._under_way, None
        if step is None or step[0] != id(output):
            return None
        _, started, features, prefill = step
        seconds = self._clock() - started
        paused = self.judge is not None and not self._drafting
        if self._own_costs and not paused:
            self._learner.observe(features, seconds)
        if prefill:
            return None
        if self.judge is not None and paused and self._learner.usable:
            if not self._drafted:
                rows, cost = int(features.decodes + features.tokens), self._learner.cost()
                self.judge.undrafted(rows, cost, features, seconds)
            return None
        if self.judge is not None and self._learner.usable:
            self.judge.took(int(features.decodes + features.tokens), self._learner.cost(), features, seconds)
        return seconds

    def _accepted(self, judge: Judge, output: Any, result: Any) -> int:
        """Tell the judge what was accepted; the tokens of the step."""
        keys, verified, accepted, total = [], [], [], 0
        for key, drafts in output.scheduled_spec_decode_tokens.items():
            tokens = result.sampled_token_ids[result.req_id_to_index[key]]
            if tokens:  # none: the request was preempted or its step failed
                keys.append(key)
                verified.append(len(drafts))
                accepted.append(min(len(tokens) - 1, len(drafts)))
        for tokens in result.sampled_token_ids:
            total += len(tokens)
        judge.verified(keys, verified, accepted)
        return total
