"""Errors: one sentence, the right status and envelope."""

from __future__ import annotations

import pytest
from deepseek_recipe import ChatCompletionRequest, ConversionError, ConversionOptions
from pydantic import BaseModel, ValidationError

from vllm_deepinfer.engine import EngineDead, EngineDraining, InvalidRequest, Overloaded
from vllm_deepinfer.gateway.errors import (
    ApiError,
    error_body,
    from_conversion,
    from_engine,
    from_validation,
    internal_error,
)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (418, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_kinds(status: int, kind: str) -> None:
    assert ApiError(status, "x").kind == kind


@pytest.mark.parametrize(
    ("seconds", "header"), [(0.0, b"1"), (0.2, b"1"), (1.0, b"1"), (1.01, b"2"), (30, b"30")]
)
def test_retry_after_is_rounded_up(seconds: float, header: bytes) -> None:
    assert ApiError(429, "x", retry_after_s=seconds).headers() == [(b"retry-after", header)]
    assert ApiError(429, "x").headers() == []


def test_envelopes() -> None:
    error = ApiError(429, "slow down.", code="c", param="p")
    assert error_body("/v1/chat/completions", error, "id") == {
        "error": {"message": "slow down.", "type": "rate_limit_error", "param": "p", "code": "c"}
    }
    assert error_body("/v1/messages/count_tokens", error, "id") == {
        "type": "error",
        "error": {"type": "rate_limit_error", "message": "slow down."},
        "request_id": "id",
    }


def test_errors_of_the_recipe() -> None:
    with pytest.raises(ConversionError) as caught:
        ChatCompletionRequest(b'{"model": "x", "messages": []}').convert(ConversionOptions())
    error = from_conversion(caught.value)
    assert error.status == 400 and error.message.endswith(".") and "{" not in error.message
    assert from_conversion(ValueError("bad\n  input")).message == "bad input."


def test_errors_of_the_engine() -> None:
    assert from_engine(InvalidRequest("too long")).status == 400
    busy = from_engine(Overloaded("full.", retry_after_s=3))
    assert (busy.status, busy.retry_after_s, busy.message) == (429, 3, "full.")
    for gone in (EngineDead("dead"), EngineDraining("stopping")):
        assert (from_engine(gone).status, from_engine(gone).retry_after_s) == (503, 1.0)


class Model(BaseModel):
    a: int
    b: list[int] = []


def test_the_first_validation_error_is_told() -> None:
    for given, says in (
        ({}, "a: this field is required."),
        ({"a": "x" * 100}, "a: send a whole number"),
        ({"a": 1, "b": [1, "y"]}, "b.1: send a whole number"),
    ):
        with pytest.raises(ValidationError) as caught:
            Model.model_validate(given)
        error = from_validation(caught.value)
        assert says in error.message and len(error.message) < 200 and error.param == says.split(":")[0]


def test_a_fault_of_ours_tells_nothing() -> None:
    assert internal_error().status == 500 and internal_error().message.endswith("send it again.")
