"""What the connector leans on in vLLM 0.32.0; when the pin moves, this says where to look."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the plugins' engine package is not installed")
NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
base_worker = pytest.importorskip(f"{NIXL}.base_worker")
pull_worker = pytest.importorskip(f"{NIXL}.pull_worker")
base_scheduler = pytest.importorskip(f"{NIXL}.base_scheduler")
pull_scheduler = pytest.importorskip(f"{NIXL}.pull_scheduler")
metadata = pytest.importorskip(f"{NIXL}.metadata")
Worker, Scheduler = base_worker.NixlBaseConnectorWorker, base_scheduler.NixlBaseConnectorScheduler


def source(function: Any) -> str:
    return inspect.getsource(function)


def test_the_version_of_the_connector() -> None:
    assert metadata.NIXL_CONNECTOR_VERSION == 14, "read its version history, then hand_over/ from the top"


def test_reads_are_done_where_we_check_them() -> None:
    """`HandOverWorker._pop_done_transfers` is asked for reads alone, and a failed one is recomputed."""
    results = source(Worker.get_transfer_results)
    assert "self._pop_done_transfers(self._recving_transfers)" in results
    assert "self._recv_failures.update(newly_failed)" in results
    assert results.index("_reap_expired_send_leases") > results.index("_pop_done_transfers")
    fields = {field.name for field in dataclasses.fields(metadata.ReqMeta)}
    assert {"remote", "awaiting_kvs"} <= fields


def test_a_handle_that_is_still_writing_is_kept() -> None:
    released = source(Worker._try_release_xfer_handle)
    assert "return False" in released and "release_xfer_handle(handle)" in released


def test_the_worker_has_what_we_touch() -> None:
    made = source(Worker.__init__) + source(pull_worker.NixlPullConnectorWorker)
    for name in (
        "_recving_metadata",
        "_recving_transfers",
        "_recv_failures",
        "_reqs_to_send",
        "_reqs_to_process",
        "_remote_agents",
        "tp_mappings",
        "xfer_stats",
        "_registered_descs",
        "consumer_notification_counts_by_req",
        "expected_consumer_notifications_by_req",
    ):
        assert f"self.{name}" in made + source(Worker), name


def test_memory_is_registered_before_the_metadata_are_taken() -> None:
    register = source(Worker.register_kv_caches)
    assert register.index("register_memory(") < register.index("get_agent_metadata()")
    assert "HandshakePayload(" in register


def test_regions_of_one_address_still_have_one_length() -> None:
    """Why `whole_blocks` is needed. If this fails, it may be dropped."""
    register = source(Worker.register_kv_caches)
    assert "if base_addr in seen_base_addresses and not route_packed_layers:" in register
    assert "self.block_len_per_layer[region_index] = block_len" in register


def test_vllm_still_prefills_the_last_position_for_windows_that_are_not_replayed() -> None:
    """Why `_prefill_backoff` is at least one."""
    assert "1 if self._has_mamba or self._bounded_replay else 0" in source(Scheduler._prefill_backoff)
    assert "self._prefill_backoff()" in source(Scheduler._truncate_request_for_prefill)
    assert "self._prefill_backoff()" in source(Scheduler._get_remote_prefill_token_count)


def test_the_scheduler_s_calls() -> None:
    for name, parameters in {
        "on_new_request": ["self", "request"],
        "update_state_after_alloc": ["self", "request", "blocks", "num_external_tokens"],
        "request_finished": ["self", "request", "block_ids"],
        "build_connector_meta": ["self", "scheduler_output"],
        "update_connector_output": ["self", "connector_output"],
    }.items():
        made = getattr(pull_scheduler.NixlPullConnectorScheduler, name)
        assert list(inspect.signature(made).parameters) == parameters, name
    assert "_reqs_need_recv" in source(Scheduler.build_connector_meta)


def test_a_request_that_is_aborted_at_once_reaches_the_connector() -> None:
    """The way of a release."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore

    assert "abort_immediately=True" in source(AsyncLLM.notify_kv_transfer_request_rejected)
    added = source(EngineCore.add_request)
    assert added.index("scheduler.add_request(request)") < added.index("request.abort_immediately")


def test_a_failed_load_is_computed_from_the_start() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler as EngineScheduler

    failed = source(EngineScheduler._handle_failed_recving)
    assert "request.num_computed_tokens = 0" in failed and "recompute_kv_load_failures" in failed
    assert "self.kv_cache_manager.free(request)" in source(EngineScheduler._update_waiting_for_remote_kv)


def test_an_aborted_load_keeps_its_blocks_until_it_ends() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler as EngineScheduler

    assert "delay_free_blocks = (" in source(EngineScheduler.finish_requests)


def test_stats_of_the_connector_reach_the_front_end() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler as EngineScheduler
    from vllm.v1.metrics.stats import SchedulerStats

    assert "kv_connector_stats" in {field.name for field in dataclasses.fields(SchedulerStats)}
    assert "self.connector.get_kv_connector_stats()" in source(EngineScheduler.update_from_output)
