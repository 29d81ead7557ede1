"""What the scheduler overrides and reads inside vLLM 0.32; when the pin moves, read `schedule()`."""

from __future__ import annotations

import inspect

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_deepinfer_plugins.replay.bounded import BoundedReplay
from vllm_deepinfer_plugins.scheduler import AsyncTimeBudgetScheduler, TimeBudgetScheduler
from vllm_deepinfer_plugins.scheduler.time_budget import TimeBudget
from vllm_deepinfer_plugins.scheduler.waiting import RankedQueue
from vllm_deepinfer_plugins.verification.adaptive import AdaptiveVerification

SIGNATURES = {
    "add_request": ["self", "request"],
    "schedule": ["self", "throttle_prefills"],
    "_reserve_prefill_lookahead": ["self", "request", "num_computed_tokens", "num_new_tokens"],
    "update_from_output": ["self", "scheduler_output", "model_runner_output"],
    "_free_request": ["self", "request", "delay_free_blocks"],
    "shutdown": ["self"],
    "_mamba_block_aligned_split": [
        "self",
        "request",
        "num_new_tokens",
        "num_new_local_computed_tokens",
        "num_external_computed_tokens",
    ],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    assert list(inspect.signature(getattr(Scheduler, name)).parameters) == SIGNATURES[name]


def test_the_asynchronous_class_overrides_none_of_it() -> None:
    """Two methods in 0.32, and neither is ours: the mixin fits in front of both classes."""
    own = {name for name in vars(AsyncScheduler) if not name.startswith(("__", "_abc"))}
    assert own == {"_update_after_schedule", "_update_request_with_output"}
    assert not own & set(vars(TimeBudget))


def test_the_hook_is_called_in_both_loops_after_the_caps_and_before_blocks_are_allocated() -> None:
    source = inspect.getsource(Scheduler.schedule)
    calls = [i for i in range(len(source)) if source.startswith("self._reserve_prefill_lookahead(", i)]
    allocations = [i for i in range(len(source)) if source.startswith("kv_cache_manager.allocate_slots(", i)]
    assert len(calls) == len(allocations) == 2
    assert calls[0] < allocations[0] < calls[1] < allocations[1]
    encoder = [i for i in range(len(source)) if source.startswith("self._try_schedule_encoder_inputs(", i)]
    assert encoder[0] < calls[0] and encoder[1] < calls[1]


def test_zero_from_the_hook_skips_a_running_request_and_ends_admission() -> None:
    """In the running loop `continue`, in the waiting loop `break`: why the queue is kept in order of rank."""
    source = inspect.getsource(Scheduler.schedule)
    after = source.split("self._reserve_prefill_lookahead(")[1:]
    first, second = (part.split("if num_new_tokens == 0:")[1] for part in after)
    assert first.index("continue") < first.index("allocate_slots")
    assert second.index("break") < second.index("allocate_slots")


def test_the_queue_is_all_that_vllm_asks_of_one() -> None:
    assert RequestQueue.__abstractmethods__ <= set(vars(RankedQueue))
    public = {name for name in vars(FCFSRequestQueue) if not name.startswith("_")}
    assert public <= set(vars(RankedQueue))


def test_stats_are_made_once_per_update_and_their_order_lets_a_custom_logger_go_first() -> None:
    from vllm.v1.metrics.loggers import StatLoggerManager

    assert inspect.getsource(Scheduler.update_from_output).count("self.make_stats(") == 1
    source = inspect.getsource(StatLoggerManager.__init__)
    assert source.index("extend(custom_stat_loggers)") < source.index("if enable_default_loggers")


def test_both_classes_are_vllm_s_with_the_mixin_in_front() -> None:
    assert TimeBudgetScheduler.__mro__[1:5] == (AdaptiveVerification, TimeBudget, BoundedReplay, Scheduler)
    assert AsyncTimeBudgetScheduler.__mro__[1:5] == (TimeBudget, BoundedReplay, AsyncScheduler, Scheduler)
    assert AsyncTimeBudgetScheduler.schedules_ahead and not TimeBudgetScheduler.schedules_ahead
