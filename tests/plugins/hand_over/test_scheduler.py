"""The scheduler's side: what is pledged, released, checked and told, step by step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

scheduler_module = pytest.importorskip("vllm_deepinfer_plugins.hand_over.scheduler")
messages = pytest.importorskip("vllm_deepinfer_plugins.hand_over.messages")
RequestStatus = pytest.importorskip("vllm.v1.request").RequestStatus
KVTransferConfig = pytest.importorskip("vllm.config").KVTransferConfig
KVConnectorOutput = pytest.importorskip("vllm.v1.outputs").KVConnectorOutput


def scheduler_of(lookahead: int = 0) -> Any:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_index=0,
            pipeline_parallel_size=1,
        ),
        cache_config=SimpleNamespace(block_size=4),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        kv_transfer_config=KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both"),
        num_prefill_lookahead_tokens=lookahead,
    )
    cache = SimpleNamespace(
        transfer_groups=(),
        kv_cache_groups=(),
        has_mamba_layers=False,
        select_transfer_block_ids=lambda block_ids: block_ids,
    )
    made = scheduler_module.HandOverScheduler(config, "engine-p", cache)
    made._boards = {"0:0": 4096}
    return made


class Blocks:
    """Two groups; nothing is cached."""

    blocks: Any = ([], [])

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        return [[1, 2], [3]]


def request_of(name: str, prompt: int = 10, **params: Any) -> Any:
    ids = list(range(prompt))
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=params or None,
        prompt_token_ids=ids,
        _all_token_ids=list(ids),
        num_prompt_tokens=prompt,
        max_tokens=1,
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
        num_computed_tokens=prompt,
        get_skip_reading_prefix_cache=lambda: False,
    )


def kept(scheduler: Any, name: str = "a") -> tuple[Any, dict[str, Any]]:
    request = request_of(name, do_remote_decode=True, do_remote_prefill=False)
    scheduler.on_new_request(request)
    scheduler.update_state_after_alloc(request, Blocks(), 0)
    held, params = scheduler.request_finished(request, ([1, 2], [3]))
    assert held
    return request, params


def meta(scheduler: Any, tokens: int = 0) -> Any:
    return scheduler.build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=tokens))


def test_the_last_position_is_left_to_the_decode_engine() -> None:
    """Also where vLLM would have computed it: a window that has moved on has given up a token it needs."""
    scheduler = scheduler_of()
    assert scheduler._prefill_backoff() == 1 and scheduler_of(lookahead=4)._prefill_backoff() == 3
    request = request_of("a", do_remote_decode=True)
    scheduler.on_new_request(request)
    assert request.num_prompt_tokens == 9 and request.prompt_token_ids == list(range(9))
    fetching = request_of("b", do_remote_prefill=True)
    assert scheduler.get_num_new_matched_tokens(fetching, 4) == (5, True)
    assert scheduler.get_num_new_matched_tokens(fetching, 9) == (0, False)


def test_a_prompt_of_one_token_is_handed_over_whole() -> None:
    scheduler = scheduler_of()
    request = request_of("a", prompt=1, do_remote_decode=True)
    scheduler.on_new_request(request)
    assert request.num_prompt_tokens == 1
    assert scheduler.get_num_new_matched_tokens(request_of("b", prompt=1, do_remote_prefill=True), 0) == (
        1,
        True,
    )


def test_a_hold_is_pledged_with_its_first_chunk() -> None:
    scheduler = scheduler_of()
    request = request_of("a", do_remote_decode=True)
    scheduler.update_state_after_alloc(request, Blocks(), 0)
    (number,) = meta(scheduler).pledges.values()
    assert number > 0 and meta(scheduler).pledges == {}, "told once"
    scheduler.update_state_after_alloc(request, Blocks(), 0)  # resumed after a preemption
    assert meta(scheduler).pledges == {}
    held, params = scheduler.request_finished(request, ([1, 2], [3]))
    assert held and messages.Pledge.of(params) == messages.Pledge(number, {"0:0": 4096})
    assert params["do_remote_prefill"] is True and params["remote_request_id"] == "a"


def test_numbers_are_never_used_twice() -> None:
    numbers = [messages.Pledge.of(kept(scheduler_of())[1]).number for _ in range(3)]
    scheduler = scheduler_of()
    numbers += [messages.Pledge.of(kept(scheduler, name)[1]).number for name in "abc"]
    assert len(set(numbers)) == 6


def test_an_aborted_request_is_not_pledged_any_more() -> None:
    scheduler = scheduler_of()
    request = request_of("a", do_remote_decode=True)
    scheduler.update_state_after_alloc(request, Blocks(), 0)
    request.status = RequestStatus.FINISHED_ABORTED
    assert scheduler.request_finished(request, ([1, 2], [3])) == (False, None)
    assert meta(scheduler).reqs_not_processed == {"a"} and not scheduler._pledges


def test_a_release_reaches_the_workers_once_and_keeps_the_engine_stepping_until_then() -> None:
    scheduler = scheduler_of()
    kept(scheduler)
    meta(scheduler)
    carrier = request_of("release-1", prompt=1, **{messages.RELEASE: ["a", "b"]})
    scheduler.on_new_request(carrier)
    carrier.status = RequestStatus.FINISHED_ABORTED
    assert scheduler.request_finished(carrier, ()) == (False, None)
    assert scheduler.has_pending_push_work()
    assert meta(scheduler).released == {"a", "b"}
    assert not scheduler.has_pending_push_work() and meta(scheduler).released == set()


def test_a_fetch_says_what_has_to_stand() -> None:
    prefill, decode = scheduler_of(), scheduler_of()
    _, params = kept(prefill)
    request = request_of("b", **params)
    decode.on_new_request(request)
    decode.update_state_after_alloc(request, Blocks(), 9)
    assert meta(decode).checks == {"b": messages.Pledge.of(params)}
    local = request_of("c", **{**params, "do_remote_prefill": True})
    decode.update_state_after_alloc(local, Blocks(), 0)  # all of it was cached: nothing is read
    made = meta(decode)
    assert made.checks == {} and set(made.reqs_to_recv) == {"c"}


def test_ends_of_holds_and_failed_fetches_are_told() -> None:
    scheduler = scheduler_of()
    output = KVConnectorOutput(finished_sending={"a"}, finished_recving={"b", "c"}, failed_recving={"c"})
    scheduler.update_connector_output(output)
    assert scheduler.stats.data[messages.RELEASED] == ["a"]
    assert scheduler.stats.data[messages.FAILED] == ["c"]
    assert not scheduler.stats.clone_and_reset().is_empty() and scheduler.stats.is_empty()


def test_the_port_is_a_free_one_unless_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(scheduler_module.PORT, raising=False)
    first, second = scheduler_of(), scheduler_of()
    assert 1024 <= first.side_channel_port != second.side_channel_port
    monkeypatch.setenv(scheduler_module.PORT, "45678")
    assert scheduler_of().side_channel_port == 45678


def test_only_steps_without_work_or_news_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(scheduler_module.time, "sleep", pauses.append)
    scheduler = scheduler_of()
    scheduler._idle_poll_s = 0.5
    meta(scheduler, tokens=7)
    kept(scheduler)
    meta(scheduler)  # the hold is news
    assert pauses == []
    meta(scheduler)
    assert pauses == [0.5]
