"""What the dialects share: model names, seeds of choices, when parsing has to be exact."""

from __future__ import annotations

from typing import Any

import pytest
from deepseek_recipe import ModelVersion

from vllm_deepinfer.engine import InvalidRequest
from vllm_deepinfer.gateway.dialects import chat
from vllm_deepinfer.gateway.dialects.base import ModelCard, Prepared
from vllm_deepinfer.gateway.errors import ApiError

CARD = ModelCard(names=("first", "second"), version=ModelVersion.DeepseekV41Flash, max_model_len=1000)


def prepare(card: ModelCard = CARD, **change: Any) -> Prepared:
    return chat.prepare(
        {"model": "first", "messages": [{"role": "user", "content": "hi"}]} | change, card, "id"
    )


def test_names() -> None:
    assert CARD.require({"model": "second"}) == "second"
    for body, status in (
        ({"model": "third"}, 404),
        ({}, 400),
        ({"model": None}, 400),
        ({"model": ["first"]}, 400),
    ):
        with pytest.raises(ApiError) as caught:
            CARD.require(body)
        assert caught.value.status == status and "first" in caught.value.message


def test_a_long_name_is_not_repeated() -> None:
    with pytest.raises(ApiError) as caught:
        CARD.require({"model": "x" * 10_000})
    assert len(caught.value.message) < 300


def test_the_context_bounds_what_may_be_asked_for() -> None:
    assert prepare(max_tokens=1000).sampling.max_tokens is None  # known with the prompt's length
    with pytest.raises(ApiError, match="max_tokens"):
        prepare(max_tokens=1001)


@pytest.mark.parametrize("thinking", [True, False])
def test_reasoning_by_default_is_the_models_choice(thinking: bool) -> None:
    card = ModelCard(names=("first",), version=CARD.version, max_model_len=1000, thinking=thinking)
    assert prepare(card).prompt.prompt.endswith("<think>" if thinking else "</think>")


def test_seeds_of_choices() -> None:
    prepared = prepare(n=3, seed=7)
    assert [prepared.sampling_for(i, 10).seed for i in range(3)] == [7, 8, 9]
    assert prepared.sampling_for(0, 10).max_tokens == 10
    assert prepare(n=3).sampling_for(2, 10).seed is None
    with pytest.raises(InvalidRequest, match="min_tokens"):
        prepare(min_tokens=5).sampling_for(0, 4)


@pytest.mark.parametrize(
    ("change", "exact"),
    [
        ({}, False),
        ({"stop": "x"}, True),
        ({"logprobs": True}, True),
        ({"stop": []}, False),
        ({"tools": []}, False),
    ],
)
def test_when_every_token_has_to_be_fed_alone(change: dict[str, Any], exact: bool) -> None:
    assert prepare(**change).exact is exact


def test_explicit_sampling_wins_over_reasonings_defaults() -> None:
    sampling = prepare(temperature=0.0, top_p=0.25).sampling
    assert (sampling.temperature, sampling.top_p) == (0.0, 0.25)
    assert prepare().sampling.temperature == 1.0


def test_the_older_encoding() -> None:
    card = ModelCard(names=("first",), version=ModelVersion.DeepseekV4Pro, max_model_len=1000)
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert "｜DSML｜tool_calls" in prepare(card, tools=[tool]).prompt.prompt
    assert "｜DSML｜ calls" in prepare(tools=[tool]).prompt.prompt
