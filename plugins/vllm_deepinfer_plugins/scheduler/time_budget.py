"""What the two schedulers add to vLLM's: a plan before its loops, a cut in the hook that it calls in them.

vLLM 0.32 calls `_reserve_prefill_lookahead` for each request that it is about to schedule, in both loops,
after all its own caps and before it allocates KV. Everything else stays vLLM's own code: prefix hits,
preemption, connectors, grammars, encoder budgets, speculation.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.policy.itl_control import ItlControl
from vllm_deepinfer.policy.prefill_order import Order
from vllm_deepinfer.policy.step_cost import Features, StepCost, Work
from vllm_deepinfer.policy.step_cost_learner import StepCostLearner

from ..cli_errors import refuse
from ..settings import Settings
from . import refusals
from .attention import empty_cost
from .complaints import Complaints
from .fit_keeper import FitKeeper
from .meter import Meter, Record
from .planner import Planner
from .report import StepReport
from .step import Step
from .waiting import RankedQueue

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as Behind
else:
    Behind = object

logger = logging.getLogger(__name__)


class TimeBudget(Behind):
    """Mixin in front of vLLM's Scheduler or AsyncScheduler.

    Attributes:
        schedules_ahead: whether the class behind it is the asynchronous one.
    """

    schedules_ahead = False

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """As vLLM's. UserError: settings, or this class, do not fit."""
        try:
            settings, empty, known = self._checked(vllm_config, kv_cache_config)
        except UserError as error:
            refuse(error)
        self._learner = StepCostLearner(empty, known)
        self._meter = Meter(self._learner, ItlControl(settings.itl_percentile))
        self._clock = time.perf_counter
        self._step: Step | None = None
        self._reports: list[StepReport] = []
        self._complaints = Complaints(settings.itl_target_ms)
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        self._most_decode = 1 + self.num_spec_tokens
        self._planner = Planner(
            self._learner,
            self._meter.control,
            Order(settings.prefill_order),
            target=settings.itl_target_ms and settings.itl_target_ms / 1e3,
            budget=settings.step_budget_ms and settings.step_budget_ms / 1e3,
            by_priority=self.policy == SchedulingPolicy.PRIORITY,
            most_decode=self._most_decode,
        )
        self.waiting = RankedQueue(self._planner.rank)
        if known is None:
            logger.info(
                "No step cost is known for this model and machine: the first steps are used to learn it."
            )

    def _checked(self, vllm_config: Any, kv_cache_config: Any) -> tuple[Settings, StepCost, StepCost | None]:
        """The settings, the cost model without coefficients, and the one that was saved, if it fits."""
        settings = Settings.read(vllm_config.additional_config)
        refusals.check_target(settings)
        refusals.check_class(self.schedules_ahead, bool(vllm_config.scheduler_config.async_scheduling))
        empty = empty_cost(settings, vllm_config, kv_cache_config)
        self._keeper = FitKeeper(settings.step_cost_file, vllm_config)
        known = self._keeper.read(empty)
        if known is not None:
            refusals.check_reachable(settings, known)
        return settings, empty, known

    def add_request(self, request: Request) -> None:
        self._planner.expect(request, self._prefix_hit(request))
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        ready = [r for r in self.kv_holding_waiting if r.request_id in self.finished_recving_kv_req_ids]
        self._step, order = self._planner.prepare(self.running, (ready, self.waiting), self._most_tokens())
        try:
            output = super().schedule(throttle_prefills)
        finally:
            step, self._step = self._step, None
        scheduled = output.num_scheduled_tokens
        if scheduled:
            self._planner.settle(step, order, scheduled.__contains__)
            self._meter.began(id(output), self._record(step, output))
        return output

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        running = request.status is RequestStatus.RUNNING
        if running and 0 < num_new_tokens <= self._most_decode and self.num_prefill_lookahead <= 1:
            return num_new_tokens  # a decode, charged already; vLLM's own rule is idle: the shortest way
        tokens = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        step = self._step
        if step is None or tokens <= 0:
            return tokens
        if tokens <= self._most_decode:  # a decode is never cut
            if not running:
                work = Work(num_computed_tokens, draft_tokens=tokens - 1)
                step.decode(self._learner.fitted.features(work))
            return tokens
        key = request.request_id
        allowed = step.running(key, tokens) if running else step.waiting(key, num_computed_tokens, tokens)
        if allowed < tokens:
            allowed = self._rounded(request, num_computed_tokens, allowed)
        step.charge(key, num_computed_tokens, allowed)
        return allowed

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        finished = self._meter.ended(id(scheduler_output), self._clock())
        if finished is not None:
            report = StepReport.of(finished, self._learner, self._meter.control, self._planner)
            self._reports.append(report)
            self._complaints.note(report)
            if finished.refitted:
                self.waiting.rerank()
                self._keeper.offer(self._learner, self._clock())
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        reports, self._reports = self._reports, []
        if line := self._complaints.line(self._clock()):
            logger.warning(line)
        if stats is not None and reports:
            reports[-1].put_into(stats)
        return stats

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._planner.forget(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def shutdown(self) -> None:
        self._keeper.offer(self._learner, float("inf"))
        super().shutdown()

    def _most_tokens(self) -> int:
        """Tokens that a step may hold: vLLM's caps, less the slots that drafting takes per request."""
        spec = self.vllm_config.speculative_config
        slots = spec.max_num_new_slots_for_drafting if spec is not None else 0
        cap = self.scheduler_config.max_num_batched_tokens - slots * len(self.running)
        return int(min(self.max_num_scheduled_tokens, cap))

    def _rounded(self, request: Request, computed: int, tokens: int) -> int:
        """A cut chunk, where vLLM's own rules allow it to end. They were applied before the cut, too."""
        if tokens and self.need_mamba_block_aligned_split:
            tokens = self._mamba_block_aligned_split(request, tokens, computed - request.num_computed_tokens)
        return int(super()._reserve_prefill_lookahead(request, computed, tokens))

    def _prefix_hit(self, request: Request) -> int:
        """Tokens of a new request that are in the prefix cache now: an estimate, looked up once."""
        if self.enable_kv_cache_events:  # a look-up may emit events there
            return 0
        hit = int(self.kv_cache_manager.get_computed_blocks(request)[1])
        return max(hit - self.prefix_replay_tokens, 0)  # a replay computes its last window again

    def replay_cost(self) -> StepCost | None:
        return self._learner.cost() if self._learner.usable else None

    def _record(self, step: Step, output: Any) -> Record:
        """What is under way; counted anew where vLLM preempted, or had no KV for what was charged."""
        scheduled = output.num_scheduled_tokens
        features, chunks = step.live.used, list(step.chunks.values())
        if len(scheduled) != step.decodes + len(chunks):
            features, chunks = self._recount(scheduled)
        return Record(
            started=self._clock(),
            features=features,
            predicted=self._learner.predict(features) if self._learner.usable else 0.0,
            budget=step.limit,
            decodes=int(features.decodes),
            chunks=chunks,
            plain=not output.scheduled_encoder_inputs and not output.has_sync_kv_loads,
        )

    def _recount(self, scheduled: dict[str, int]) -> tuple[Features, list[int]]:
        cost, features, chunks = self._learner.fitted, Features(), []
        for request_id, tokens in scheduled.items():
            context = self.requests[request_id].num_computed_tokens - tokens  # already advanced
            if tokens > self._most_decode:
                chunks.append(tokens)
                work = Work(context, prefill_tokens=tokens)
            else:
                work = Work(context, draft_tokens=tokens - 1)
            features = features + cost.features(work)
        return features, chunks
