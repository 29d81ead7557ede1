"""The front end's books of holds: by both ids, counted, and told once."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from vllm_deepinfer.engine import FinishReason, GenerateRequest, KvHandOver, SamplingParams

holds_module = pytest.importorskip("vllm_deepinfer_plugins.engine.holds")
entry_module = pytest.importorskip("vllm_deepinfer_plugins.engine.entry")
params_module = pytest.importorskip("vllm_deepinfer_plugins.engine.params")
messages = pytest.importorskip("vllm_deepinfer_plugins.hand_over.messages")
engine = pytest.importorskip("vllm.v1.engine")
TRANSFER = {"remote_block_ids": [[1]], "remote_request_id": "internal"}


def entry_of(name: str = "r", **hand_over: Any) -> Any:
    request = GenerateRequest(
        request_id=name,
        prompt_token_ids=[1, 2],
        sampling=SamplingParams(max_tokens=1),
        hand_over=KvHandOver(**hand_over),
    )
    made = entry_module.Entry(request, lambda deltas: None, False, "layout")
    made.internal_id = f"{name}-internal"
    return made


def holds_of(stuck: list[str] | None = None) -> Any:
    return holds_module.Holds((stuck if stuck is not None else []).append)


def test_a_kept_request_s_end_says_where_its_kv_is() -> None:
    entry = entry_of(keep=True)
    output = engine.EngineCoreOutput(
        "i", [5], finish_reason=engine.FinishReason.LENGTH, kv_transfer_params=TRANSFER
    )
    delta = entry.delta(output)
    assert delta.finish_reason is FinishReason.LENGTH and entry.held
    assert delta.kv_source == {"layout": "layout", "params": TRANSFER}


@pytest.mark.parametrize("hand_over", [{}, {"source": {"layout": "layout", "params": TRANSFER}}])
def test_others_keep_nothing(hand_over: dict[str, Any]) -> None:
    entry = entry_of(**hand_over)
    output = engine.EngineCoreOutput(
        "i", [5], finish_reason=engine.FinishReason.LENGTH, kv_transfer_params=TRANSFER
    )
    assert entry.delta(output).kv_source is None and not entry.held


def test_vllm_is_told_what_to_do() -> None:
    def told(**hand_over: Any) -> Any:
        extra = params_module.sampling_params_of(entry_of(**hand_over).request).extra_args or {}
        return extra.get("kv_transfer_params")

    assert told(keep=True) == {"do_remote_decode": True, "do_remote_prefill": False}
    assert told(source={"layout": "x", "params": TRANSFER}) == TRANSFER
    assert told() is None


def test_a_hold_ends_when_vllm_says_so() -> None:
    holds = holds_of()
    holds.add(entry_of("a"))
    holds.add(entry_of("b"))
    assert len(holds) == 2 and "a" in holds
    holds.hear({messages.RELEASED: ["a-internal", "never-seen"]})
    assert len(holds) == 1 and "a" not in holds


def test_a_hold_is_taken_once_and_its_late_end_is_nothing() -> None:
    holds = holds_of()
    holds.add(entry_of("a"))
    assert holds.take(["a", "b"]) == ["a-internal"] and holds.take(["a"]) == []
    holds.hear({messages.RELEASED: ["a-internal"]})
    assert len(holds) == 0


def test_events_are_counted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    stuck: list[str] = []
    holds = holds_of(stuck)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            holds.hear({messages.EXPIRED: [1, 1], messages.FAILED: ["x"], messages.STUCK: ["y"]})
    assert +holds.counts == {"expired": 4, "recomputed": 2, "stuck": 2} and stuck == ["y", "y"]
    assert len(caplog.records) == 3


@pytest.mark.parametrize(
    "source", [{"layout": "other", "params": TRANSFER}, {"params": TRANSFER}, {"layout": "layout"}, {"x": 1}]
)
def test_a_source_that_cannot_be_read_is_left_out_and_counted(source: dict[str, Any]) -> None:
    holds = holds_of()
    request = entry_of(source=source).request
    assert holds.usable(request, "layout").hand_over == KvHandOver()
    assert holds.counts["foreign"] == 1


def test_a_source_of_the_same_layout_is_used() -> None:
    holds = holds_of()
    request = entry_of(source={"layout": "layout", "params": TRANSFER}).request
    assert holds.usable(request, "layout") is request and not +holds.counts
    assert holds.usable(entry_of(keep=True).request, "layout").hand_over == KvHandOver(keep=True)
