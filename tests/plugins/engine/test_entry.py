"""One engine-core output becomes one delta."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vllm_deepinfer.engine import (
    UNBUILT,
    ConstraintKind,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    StructuredOutput,
    TokenLogprobs,
)

entry_module = pytest.importorskip("vllm_deepinfer_plugins.engine.entry")
engine = pytest.importorskip("vllm.v1.engine")
Core = engine.FinishReason


def entry_of(speculates: bool = False, **sampling: Any) -> Any:
    request = GenerateRequest(request_id="r", prompt_token_ids=[1, 2], sampling=SamplingParams(**sampling))
    return entry_module.Entry(request, lambda deltas: None, speculates)


def output(tokens: list[int], **values: Any) -> Any:
    return engine.EngineCoreOutput("internal", tokens, **values)


def test_tokens_pass_through() -> None:
    delta = entry_of().delta(output([5]))
    assert (delta.request_id, delta.token_ids, delta.final) == ("r", [5], False)
    assert (delta.logprobs, delta.prompt_logprobs, delta.error) == (None, None, None)


def test_an_output_without_tokens_or_end_is_nothing() -> None:
    assert entry_of().delta(output([])) is None


@pytest.mark.parametrize(
    ("core", "ours"),
    [
        (Core.STOP, FinishReason.STOP),
        (Core.LENGTH, FinishReason.LENGTH),
        (Core.ABORT, FinishReason.ABORT),
        (Core.ERROR, FinishReason.ERROR),
        (Core.REPETITION, FinishReason.STOP),
    ],
)
def test_every_end_of_vllm_has_ours(core: Any, ours: FinishReason) -> None:
    entry = entry_of()
    delta = entry.delta(output([5], finish_reason=core))
    assert delta.finish_reason is ours and entry.ended
    assert bool(delta.error) == (ours is FinishReason.ERROR)


def test_a_constraint_that_cannot_be_built_is_named() -> None:
    """vLLM fails such a request before its first token; later, or without one, it is another fault."""
    constrained: dict[str, Any] = {"structured": StructuredOutput(kind=ConstraintKind.REGEX, value="a")}
    assert entry_of(**constrained).delta(output([], finish_reason=Core.ERROR)).stop_reason == UNBUILT
    assert entry_of().delta(output([], finish_reason=Core.ERROR)).stop_reason is None
    begun = entry_of(**constrained)
    begun.delta(output([5]))
    assert begun.delta(output([], finish_reason=Core.ERROR)).stop_reason is None


def test_no_end_of_vllm_is_forgotten() -> None:
    assert set(entry_module.FINISH_REASONS) == set(Core)


def test_only_the_callers_stop_tokens_are_named() -> None:
    stop = {"finish_reason": Core.STOP, "stop_reason": 7}
    assert entry_of(stop_token_ids=[7]).delta(output([7], **stop)).stop_reason == 7
    assert entry_of().delta(output([7], **stop)).stop_reason is None, "a second end-of-sequence id"


def test_cached_tokens_are_those_of_the_first_prefill_and_stay() -> None:
    stats = pytest.importorskip("vllm.v1.metrics.stats").PrefillStats
    entry = entry_of()
    first = entry.delta(output([5], prefill_stats=stats(num_prompt_tokens=64, num_cached_tokens=32)))
    again = entry.delta(output([6], prefill_stats=stats(num_prompt_tokens=65, num_cached_tokens=64)))
    assert (first.cached_tokens, again.cached_tokens) == (32, 32), "a resumed request hits its own blocks"


def test_accepted_drafts_are_all_but_the_last_token_of_a_decode() -> None:
    entry = entry_of(speculates=True)
    assert [entry.delta(output(tokens)).accepted_draft_tokens for tokens in ([1], [2, 3, 4], [5])] == [
        0,
        2,
        0,
    ]
    assert entry_of(speculates=False).delta(output([1, 2])).accepted_draft_tokens == 0


def test_logprobs_are_split_into_the_sampled_token_and_the_most_likely() -> None:
    lists = pytest.importorskip("vllm.v1.outputs").LogprobsLists(
        np.array([[5, 9, 5], [6, 6, 8]]),
        np.array([[-2.0, -0.5, -2.0], [-0.25, -0.25, -3.0]]),
        np.array([2, 1]),
        None,
    )
    delta = entry_of(logprobs=2).delta(output([5, 6], new_logprobs=lists))
    assert delta.logprobs == [
        TokenLogprobs(5, -2.0, 2, ((9, -0.5), (5, -2.0))),
        TokenLogprobs(6, -0.25, 1, ((6, -0.25), (8, -3.0))),
    ]


def test_an_end_without_tokens_has_no_logprobs() -> None:
    assert entry_of(logprobs=2).delta(output([], finish_reason=Core.ABORT)).logprobs == []


def test_prompt_logprobs_come_with_the_first_token_only() -> None:
    torch = pytest.importorskip("torch")
    tensors = pytest.importorskip("vllm.v1.outputs").LogprobsTensors(
        torch.tensor([[2, 4]]), torch.tensor([[-1.5, -0.5]]), torch.tensor([3])
    )
    entry = entry_of(prompt_logprobs=1)
    first = entry.delta(output([5], new_prompt_logprobs_tensors=tensors))
    assert first.prompt_logprobs == [None, TokenLogprobs(2, -1.5, 3, ((4, -0.5),))]
    assert entry.delta(output([6])).prompt_logprobs is None


def test_an_end_outside_a_step() -> None:
    entry = entry_of()
    delta = entry.end(FinishReason.ERROR, "gone")
    assert entry.ended
    assert (delta.request_id, list(delta.token_ids), delta.error) == ("r", [], "gone")
    assert delta.finish_reason is FinishReason.ERROR
