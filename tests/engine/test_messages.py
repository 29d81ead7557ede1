"""Messages survive the wire, refuse what is impossible, and derive what they derive."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.engine import (
    ConstraintKind,
    FinishReason,
    GenerateRequest,
    Health,
    HealthState,
    InvalidRequest,
    KvHandOver,
    Load,
    SamplingParams,
    StructuredOutput,
    Targets,
    TokenDelta,
    TokenLogprobs,
)

token_ids = st.lists(st.integers(0, 2**31), max_size=5)
logprobs = st.builds(
    TokenLogprobs,
    st.integers(0, 9),
    st.floats(-50, 0),
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(0, 9), st.floats(-50, 0)), max_size=3),
)
deltas = st.builds(
    TokenDelta,
    st.text(max_size=5),
    token_ids,
    st.none() | st.sampled_from(FinishReason),
    st.none() | st.integers(0, 9) | st.text(max_size=3),
    st.none() | st.lists(logprobs, max_size=3),
    st.none() | st.lists(st.none() | logprobs, max_size=3),
    st.integers(0, 9),
    st.integers(0, 9),
    st.none() | st.text(max_size=5),
    st.none()
    | st.dictionaries(st.text(max_size=3), st.integers(0, 9) | st.lists(st.integers(0, 9), max_size=3)),
)


@given(st.lists(deltas, max_size=4))
def test_a_step_survives_msgpack(step: list[TokenDelta]) -> None:
    wire = msgspec.msgpack.encode(step)
    back = msgspec.msgpack.decode(wire, type=list[TokenDelta])
    assert msgspec.msgpack.encode(back) == wire
    assert [(d.request_id, list(d.token_ids), d.finish_reason) for d in back] == [
        (d.request_id, list(d.token_ids), d.finish_reason) for d in step
    ]


def test_a_plain_delta_is_a_short_array() -> None:
    assert msgspec.msgpack.encode(TokenDelta("r1", [5])) == b"\x9a\xa2r1\x91\x05\xc0\xc0\xc0\xc0\0\0\xc0\xc0"


def test_a_request_survives_msgpack() -> None:
    request = GenerateRequest(
        request_id="r",
        prompt_token_ids=[1, 2],
        sampling=SamplingParams(
            max_tokens=3,
            stop_token_ids=[4],
            logit_bias={5: 1.5},
            structured=StructuredOutput(kind=ConstraintKind.REGEX, value="a+", after_reasoning=True),
        ),
        priority=-1,
        cache_salt="s",
        targets=Targets(ttft_ms=100.0),
        traffic_class="agent",
        hand_over=KvHandOver(source={"engine": "e1", "blocks": [[1, 2], [3]]}),
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=GenerateRequest) == request


def test_an_invalid_request_from_the_wire_is_refused_too() -> None:
    wire = msgspec.msgpack.encode({"request_id": "", "prompt_token_ids": [1]})
    with pytest.raises(msgspec.ValidationError, match="request_id must not be empty"):
        msgspec.msgpack.decode(wire, type=GenerateRequest)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"request_id": "", "prompt_token_ids": [1]}, "request_id must not be empty"),
        ({"request_id": "r", "prompt_token_ids": []}, "at least one token"),
    ],
)
def test_requests_without_id_or_prompt_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        GenerateRequest(**values)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["ttft_ms", "itl_ms"])
def test_targets_are_positive_and_finite(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be a positive number"):
        Targets(**{name: value})


def test_derived_values() -> None:
    assert TokenDelta("r", [1]).final is False
    assert TokenDelta("r", [], FinishReason.ABORT).final is True
    assert Load(running_requests=2, waiting_requests=3, held_requests=7).active_requests == 5
    serving = [state for state in HealthState if Health(state=state).serving]
    assert serving == [HealthState.READY, HealthState.DRAINING]


def test_messages_are_immutable() -> None:
    with pytest.raises(AttributeError):
        TokenDelta("r").cached_tokens = 3  # type: ignore[misc]
