"""What replays override and read inside vLLM 0.32; when the pin moves, look at the methods named here."""

from __future__ import annotations

import inspect

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

SIGNATURES = {
    "_get_local_prefix_cache_hit": ["self", "request"],
    "_mark_prefix_replay": ["self", "request", "num_hit_tokens", "window_loaded"],
    "_preempt_request": ["self", "request", "timestamp", "drop_stale_output"],
    "_free_request": ["self", "request", "delay_free_blocks"],
    "reset_prefix_cache": ["self", "reset_running_requests", "reset_connector"],
    "schedule": ["self", "throttle_prefills"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_scheduler(name: str) -> None:
    assert list(inspect.signature(getattr(Scheduler, name)).parameters) == SIGNATURES[name]


def test_the_rewind_is_vllm_s() -> None:
    """A hit is looked up, marked and rewound in this order; hits of at most a window are dropped between."""
    source = inspect.getsource(Scheduler.schedule)
    look_up = source.index("self._get_local_prefix_cache_hit(request)")
    dropped = source.index("0 < num_computed_tokens <= self.prefix_replay_tokens")
    marked = source.index("self._mark_prefix_replay(")
    assert look_up < dropped < marked < source.index("num_computed_tokens -= num_replay_tokens")
    assert "self._mark_prefix_replay(" in inspect.getsource(Scheduler._update_waiting_for_remote_kv)


def test_the_runner_calls_the_model_in_one_place() -> None:
    assert inspect.getsource(GPUModelRunner.execute_model).count("self._model_forward(") == 1
    assert "This method can be overridden by subclasses" in (GPUModelRunner._model_forward.__doc__ or "")
    assert "model_kwargs" in inspect.signature(GPUModelRunner._model_forward).parameters


def test_the_runner_needs_no_state_that_its_class_would_have_made() -> None:
    assert "self.model_runner = CPUModelRunner(" in inspect.getsource(CPUWorker.init_device)
    assert not hasattr(CPUModelRunner, "__slots__")
    initialize = inspect.signature(CPUModelRunner.initialize_kv_cache).parameters
    assert list(initialize)[:2] == ["self", "kv_cache_config"]


def test_blocks_are_freed_after_the_request_is() -> None:
    """Window KV is kept from the blocks that a request still has when `_free_request` begins."""
    source = inspect.getsource(Scheduler._free_request)
    assert "_free_blocks" in source
    assert "free" in inspect.getsource(Scheduler._preempt_request)
    assert callable(KVCacheManager.get_block_ids)


def test_zeroing_spares_windows() -> None:
    """Restored rows are written before the step; vLLM zeroes full-attention blocks alone on a CPU."""
    assert "FullAttentionSpec" in inspect.getsource(CPUModelRunner._zero_block_ids)
