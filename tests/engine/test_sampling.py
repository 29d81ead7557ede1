"""Sampling parameters: every range has its sentence."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vllm_deepinfer.engine import ConstraintKind, InvalidRequest, SamplingParams, StructuredOutput


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens must be in [1, ∞), got 0."),
        ({"min_tokens": -1}, "min_tokens must be in [0, ∞), got -1."),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be in [0, 4], got 5."),
        ({"temperature": -0.1}, "temperature must be in [0, 10000], got -0.1."),
        ({"temperature": math.nan}, "temperature must be in [0, 10000], got nan."),
        ({"temperature": math.inf}, "temperature must be in [0, 10000], got inf."),
        ({"top_p": 0.0}, "top_p must be in (0, 1], got 0.0."),
        ({"top_p": 1.01}, "top_p must be in (0, 1], got 1.01."),
        ({"top_k": -1}, "top_k must be in [0, ∞), got -1."),
        ({"min_p": 1.5}, "min_p must be in [0, 1], got 1.5."),
        ({"seed": 2**63}, f"seed must be in [-9.22337e+18, 9.22337e+18], got {2**63}."),
        ({"presence_penalty": 2.5}, "presence_penalty must be in [-2, 2], got 2.5."),
        ({"frequency_penalty": -2.5}, "frequency_penalty must be in [-2, 2], got -2.5."),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be in (0, 10000], got 0.0."),
        ({"logprobs": -1}, "logprobs must be in [0, ∞), got -1."),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be in [0, ∞), got -1."),
        ({"stop_token_ids": [3, -3]}, "stop_token_ids must be in [0, ∞), got -3."),
        ({"logit_bias": {7: 101.0}}, "logit_bias[7] must be in [-100, 100], got 101.0."),
        ({"logit_bias": {-7: 1.0}}, "logit_bias key must be in [0, ∞), got -7."),
    ],
)
def test_a_value_out_of_range_is_named_with_its_range(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**values)
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_tokens": 1, "min_tokens": 1},
        {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
        {"seed": -(2**63), "presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"logprobs": 0, "prompt_logprobs": 0, "logit_bias": {0: -100.0}},
    ],
)
def test_the_ends_of_the_ranges_are_allowed(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values


def test_constraints_have_a_value_exactly_when_they_need_one() -> None:
    StructuredOutput(kind=ConstraintKind.JSON_OBJECT)
    with pytest.raises(InvalidRequest, match="takes no value"):
        StructuredOutput(kind=ConstraintKind.JSON_OBJECT, value="{}")
    for kind in set(ConstraintKind) - {ConstraintKind.JSON_OBJECT}:
        StructuredOutput(kind=kind, value="x")
        with pytest.raises(InvalidRequest, match=f"kind {kind} needs a value"):
            StructuredOutput(kind=kind)


def test_invalid_request_is_a_value_error() -> None:
    with pytest.raises(ValueError):
        SamplingParams(max_tokens=0)
