"""The recipe's errors in plain words, with the place."""

from __future__ import annotations

from typing import Any

import pytest
from deepseek_recipe import ChatCompletionRequest, ConversionError, ConversionOptions, MessagesRequest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.gateway.conversion_errors import Attempt, located, plain

RUST = ("expected u", "struct ", "enum ", "variant", "invalid type", "invalid value", "sequence", "`")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('invalid type: string "5", expected u32', 'send a whole number, 0 or more, got "5".'),
        ("invalid value: integer `-1`, expected u8", "send a whole number, 0 or more, got -1."),
        ("invalid type: floating point `1.5`, expected i64", "send a whole number, got 1.5."),
        ("invalid type: integer `5`, expected a boolean", "send true or false, got 5."),
        ("invalid type: integer `5`, expected a sequence", "send a list, got 5."),
        ("invalid type: null, expected a string", "send a string, got null."),
        ("invalid type: integer `5`, expected struct ChatCompletionTool", "send an object, got 5."),
        ("invalid type: sequence, expected internally tagged enum Tool", "send an object, got sequence."),
        ("invalid length 0, expected struct Thinking with 2 elements", "send an object, got 0."),
        ("unknown variant `xml`, expected one of `a`, `b`", "send one of a, b; got 'xml'."),
        ("field `type`: unknown variant `x`, expected `function`", "type: send function; got 'x'."),
        ("missing field `content`", "content is missing: send a string or a list of parts."),
        ("missing field `other`", "other is missing: send it."),
        ("Empty input messages", "Empty input messages."),
        (
            f'invalid type: string "{"a" * 500}", expected u32',
            f'send a whole number, 0 or more, got "{"a" * 56}...',
        ),
    ],
)
def test_a_sentence_in_plain_words(text: str, said: str) -> None:
    assert plain(f"invalid request body: {text}") == plain(text) == said


def chat(body: dict[str, Any]) -> object:
    return ChatCompletionRequest(body).convert(ConversionOptions())


def messages(body: dict[str, Any]) -> object:
    return MessagesRequest(body).convert(ConversionOptions())


def refusal(attempt: Attempt, body: dict[str, Any]) -> ConversionError | ValueError:
    try:
        attempt(body)
    except (ConversionError, ValueError) as error:
        return error
    raise AssertionError("it was accepted")


GOOD = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("change", "where", "said"),
    [
        ({"stream": "yes"}, "stream", 'stream: send true or false, got "yes".'),
        ({"top_logprobs": -1}, "top_logprobs", "top_logprobs: send a whole number, 0 or more, got -1."),
        ({"tools": 5}, "tools", "tools: send a list, got 5."),
        ({"messages": []}, "messages", "messages: empty input messages."),
        (
            {"messages": [GOOD, {"role": "user"}]},
            "messages.1",
            "messages.1: content is missing: send a string or a list of parts.",
        ),
        (
            {"messages": [GOOD, GOOD, {"role": "boss", "content": "x"}], "stream": True},
            "messages.2",
            "messages.2: send one of system, user, assistant, tool, latest_reminder; got 'boss'.",
        ),
    ],
)
def test_the_place_is_found(change: dict[str, Any], where: str, said: str) -> None:
    body = {"model": "DeepSeek-V4.1-Flash", "messages": [GOOD]} | change
    error = located(refusal(chat, body), body, chat)
    assert (error.status, error.param, error.message) == (400, where, said)


def test_a_field_that_the_parts_need_is_found_too() -> None:
    body = {"model": "DeepSeek-V4.1-Flash", "messages": [GOOD], "max_tokens": 5, "stop_sequences": 7}
    error = located(refusal(messages, body), body, messages)
    assert (error.param, error.message) == ("stop_sequences", "stop_sequences: send a list, got 7.")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "role", "content"]), inner)
    ),
    max_leaves=4,
)


@given(
    name=st.sampled_from(["messages", "stream", "stop", "tools", "response_format", "thinking", "logprobs"]),
    value=json_values,
)
def test_whatever_is_wrong_no_parser_speaks(name: str, value: Any) -> None:
    body = {"model": "DeepSeek-V4.1-Flash", "messages": [GOOD], name: value}
    try:
        chat(body)
    except (ConversionError, ValueError) as caught:
        error = located(caught, body, chat)
        assert error.param is not None and error.param.split(".")[0] == name
        assert error.message.startswith(name) and error.message.endswith(".")
        if not isinstance(value, str) and "text" not in repr(value):
            assert not any(word in error.message.split("got")[0] for word in RUST), error.message
