"""Output parsing at every two-way split of recorded outputs, in V4's and V4.1's dialect.

Outputs become one token per byte, with control tokens as such, so that a split can fall anywhere: in a tag,
an escape, a character.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from deepseek_recipe import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ConversationRequest,
    ConversionOptions,
    MessagesRequest,
    MessagesResponse,
    ModelVersion,
    ResponsesRequest,
    ResponsesResponse,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.harness import DATA, EOS, TOKENIZER, ids_of
from vllm_deepinfer.engine import FinishReason, TokenDelta, TokenLogprobs
from vllm_deepinfer.gateway.dialects.chat import ChatEncoder
from vllm_deepinfer.gateway.streaming.parser import OutputParser
from vllm_deepinfer.gateway.tokens import PromptTokenizer

PROMPTS = PromptTokenizer.from_file(DATA)

VOCABULARY: dict[str, int] = json.loads((DATA / "tokenizer.json").read_text())["model"]["vocab"]
CONTROL = ("<think>", "</think>", "｜DSML｜")


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


BYTES = {byte: VOCABULARY[letter] for byte, letter in _byte_alphabet().items()}


def byte_ids(text: str) -> list[int]:
    """One id per byte; control tokens are their own id."""
    ids: list[int] = []
    while text:
        control = next((c for c in CONTROL if text.startswith(c)), None)
        if control is not None:
            ids += ids_of(control)
            text = text[len(control) :]
        else:
            ids += [BYTES[byte] for byte in text[0].encode()]
            text = text[1:]
    return ids


TOOL = {"name": "f", "parameters": {"type": "object"}}
USER = [{"role": "user", "content": "hi"}]
APIS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "chat": (
        ChatCompletionRequest,
        ChatCompletionResponse,
        {"messages": USER, "tools": [{"type": "function", "function": TOOL}]},
    ),
    "responses": (
        ResponsesRequest,
        ResponsesResponse,
        {"input": "hi", "tools": [{"type": "function"} | TOOL]},
    ),
    "messages": (
        MessagesRequest,
        MessagesResponse,
        {"messages": USER, "max_tokens": 99, "tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    ),
}


@dataclass(frozen=True)
class Answer:
    """What a client would make of an output."""

    reasoning: str
    text: str
    calls: tuple[tuple[str, str], ...]
    reason: str
    tokens: int


def convert(api: str, version: ModelVersion, **change: Any) -> tuple[Any, Any, ConversationRequest]:
    request, response, body = APIS[api]
    options = ConversionOptions().with_model_alias("m", version)
    return request, response, request(json.dumps({"model": "m"} | body | change)).convert(options)


def parse(
    deltas: Sequence[Sequence[int]],
    api: str = "chat",
    version: ModelVersion = ModelVersion.DeepseekV41Flash,
    end: FinishReason = FinishReason.STOP,
    conversation: tuple[Any, Any, ConversationRequest] | None = None,
    exact: bool = False,
    own: bool = True,
) -> Answer:
    """Feed the deltas and put the chunks together; `own`: with the gateway's detokeniser, as it streams."""
    request, response, converted = conversation or convert(api, version)
    generator = request.chunk_generator(converted, "id", "m")
    parser = OutputParser(
        generator,
        converted.parsing_options,
        TOKENIZER,
        eos_token_ids=[EOS],
        prompt_tokens=1,
        exact=exact,
        detokenizer=PROMPTS.stream_detokenizer() if own else None,
    )
    whole = response("id", "m", 0, 0, 0)
    last = len(deltas) - 1
    for i, ids in enumerate(deltas):
        for chunk in parser.feed(TokenDelta("r", list(ids), end if i == last else None)):
            whole.accumulate(chunk)
    assert parser.finished
    return READ[api](json.loads(whole.to_json()), parser.tokens)


def _chat(document: Any, tokens: int) -> Answer:
    choice = document["choices"][0]
    message = choice["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    reasoning, text = message.get("reasoning_content") or "", message.get("content") or ""
    return Answer(reasoning, text, tuple(calls), choice["finish_reason"], tokens)


def _responses(document: Any, tokens: int) -> Answer:
    items = document["output"]

    def text(kind: str) -> str:
        return "".join(p["text"] for item in items if item["type"] == kind for p in item["content"])

    calls = tuple((item["name"], item["arguments"]) for item in items if item["type"] == "function_call")
    return Answer(text("reasoning"), text("message"), calls, document["status"], tokens)


def _messages(document: Any, tokens: int) -> Answer:
    blocks = document["content"]

    def text(kind: str) -> str:
        return "".join(block[kind] for block in blocks if block["type"] == kind)

    calls = tuple((b["name"], json.dumps(b["input"])) for b in blocks if b["type"] == "tool_use")
    return Answer(text("thinking"), text("text"), calls, document["stop_reason"], tokens)


READ = {"chat": _chat, "responses": _responses, "messages": _messages}

V41 = ModelVersion.DeepseekV41Flash
V4 = ModelVersion.DeepseekV4Pro


def block(version: ModelVersion, *invokes: Sequence[tuple[str, Any]]) -> str:
    """A block of calls of `f`; strings as text, the rest as JSON."""
    space, calls = (" ", " calls") if version == V41 else ("", "tool_calls")

    def parameter(name: str, value: Any) -> str:
        kind, text = ("true", value) if isinstance(value, str) else ("false", json.dumps(value))
        head = f'<｜DSML｜{space}parameter name="{name}" string="{kind}">'
        return f"{head}{text}</｜DSML｜{space}parameter>\n"

    parts = []
    for arguments in invokes:
        parameters = "".join(parameter(name, value) for name, value in arguments)
        parts.append(f'<｜DSML｜{space}invoke name="f">\n{parameters}</｜DSML｜{space}invoke>\n')
    return f"\n\n<｜DSML｜{calls}>\n{''.join(parts)}</｜DSML｜{calls}>"


NASTY: dict[str, Any] = {
    "angle brackets": "a < b > c << d >> e </ f",
    "shell": "grep -r 'x' . 2>&1 | tail -1 > /dev/null",
    "ends in a redirect": "make test 2>&1",
    "ends in an opener": "cat <",
    "ends in a closer's head": "x </",
    "emoji and CJK": "😀👩‍👩‍👧 漢字 한글 é",
    "control characters": "\x00\x01\x1f\x7f tab\t newline\n",
    "quotes and backslashes": '"\\"\\n\\\\ \\u0041 \'',
    "markup like ours": '<invoke name="g"> <parameter name="x"> </parameter> <|DSML|> ｜DSML',
    "the token alone": "<｜DSML｜ ｜DSML｜",
    "an opened parameter": '<｜DSML｜ parameter name="b" string="true">z',
    "think tags": "<think>no</think>",
    "empty": "",
    "nested JSON": {"k": ["<", {"deep": [1, 2.5, None, True, '"}]']}]},
    "a number": -1.5e3,
    "null": None,
}


@pytest.mark.parametrize("own", [True, False], ids=["own detokeniser", "recipe's"])
@pytest.mark.parametrize("version", [V41, V4], ids=["V4.1", "V4"])
@pytest.mark.parametrize("value", NASTY.values(), ids=NASTY.keys())
def test_every_split_gives_the_same_call(version: ModelVersion, value: Any, own: bool) -> None:
    output = f"think</think>ok{block(version, [('a', value), ('n', 3)], [('a', value)])}"
    ids = byte_ids(output)
    conversation = convert("chat", version)
    expected = [{"a": value, "n": 3}, {"a": value}]
    for split in range(len(ids) + 1):
        answer = parse([ids[:split], ids[split:]], conversation=conversation, own=own)
        assert [json.loads(arguments) for _, arguments in answer.calls] == expected, split
        assert (answer.reasoning, answer.text, answer.reason) == ("think", "ok", "tool_calls"), split
        assert answer.tokens == len(ids)


@pytest.mark.parametrize("api", ["responses", "messages"])
@pytest.mark.parametrize("version", [V41, V4], ids=["V4.1", "V4"])
def test_every_split_in_the_other_apis(api: str, version: ModelVersion) -> None:
    value = "東京 2>&1 </ 😀"
    ids = byte_ids(f"think</think>ok{block(version, [('a', value)])}")
    conversation = convert(api, version)
    for split in range(len(ids) + 1):
        answer = parse([ids[:split], ids[split:]], api, conversation=conversation)
        assert [json.loads(arguments) for _, arguments in answer.calls] == [{"a": value}], split
        assert (answer.reasoning, answer.text) == ("think", "ok"), split
        assert answer.reason == {"responses": "completed", "messages": "tool_use"}[api]


@pytest.mark.parametrize("version", [V41, V4], ids=["V4.1", "V4"])
def test_byte_by_byte(version: ModelVersion) -> None:
    for value in NASTY.values():
        ids = byte_ids(f"think</think>ok{block(version, [('a', value)])}")
        for exact, own in itertools.product((False, True), repeat=2):
            answer = parse([[i] for i in ids], version=version, exact=exact, own=own)
            assert [json.loads(arguments) for _, arguments in answer.calls] == [{"a": value}]


WHOLE = f"r</think>ok{block(V41, [('a', 'q')])}"
BROKEN = {
    "calls closed twice": WHOLE + "</｜DSML｜ calls>",
    "invoke closed twice": WHOLE.replace("</｜DSML｜ invoke>\n", "</｜DSML｜ invoke>\n</｜DSML｜ invoke>\n"),
    "calls not closed": WHOLE.removesuffix("</｜DSML｜ calls>"),
    "invoke not closed": WHOLE.replace("</｜DSML｜ invoke>\n", ""),
    "parameter not closed": WHOLE.replace("</｜DSML｜ parameter>\n", ""),
    "text after the block": WHOLE + "and some more",
    "no block around the invoke": WHOLE.replace("<｜DSML｜ calls>\n", "", 1).removesuffix(
        "</｜DSML｜ calls>"
    ),
    "the other dialect's block": WHOLE.replace("｜ calls", "｜tool_calls"),
    "the calls end the reasoning": WHOLE.replace("</think>ok", ""),
}


@pytest.mark.parametrize("output", BROKEN.values(), ids=BROKEN.keys())
def test_broken_markup_loses_no_call_and_shows_no_markup(output: str) -> None:
    ids = byte_ids(output)
    conversation = convert("chat", V41)
    for split in range(len(ids) + 1):
        answer = parse([ids[:split], ids[split:]], conversation=conversation)
        assert answer.calls == (("f", '{"a": "q"}'),), split
        assert answer.reasoning == "r" and answer.text == ("" if "</think>" not in output else "ok")
        assert answer.reason == "tool_calls"


def test_an_output_cut_anywhere_is_the_same_however_it_is_split() -> None:
    ids = byte_ids(f"r</think>ok{block(V41, [('a', 'q </'), ('b', {'k': 1})])}")
    conversation = convert("chat", V41)
    for cut in range(0, len(ids), 3):
        kept = ids[:cut]
        whole = parse([kept], end=FinishReason.LENGTH, conversation=conversation)
        assert whole.reason == "length" and whole.tokens == cut
        assert "DSML" not in whole.text and "parameter" not in whole.text
        for split in range(0, cut, 5):
            again = parse([kept[:split], kept[split:]], end=FinishReason.LENGTH, conversation=conversation)
            assert again == whole, (cut, split)


@settings(max_examples=60, deadline=None)
@given(
    value=st.text(max_size=30).filter(lambda text: "｜DSML｜" not in text and "\ufffd" not in text),
    other=st.recursive(
        st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    ).filter(lambda value: not isinstance(value, str)),
    cuts=st.lists(st.floats(0, 1), max_size=6),
)
def test_any_arguments_at_any_splits(value: str, other: Any, cuts: list[float]) -> None:
    ids = byte_ids(f"r</think>{block(V41, [('a', value), ('b', other)])}")
    places = sorted(round(cut * len(ids)) for cut in cuts)
    deltas = [ids[i:j] for i, j in zip([0, *places], [*places, len(ids)], strict=True)]
    answer = parse(deltas)
    assert [json.loads(arguments) for _, arguments in answer.calls] == [{"a": value, "b": other}]
    assert answer.text == "" and answer.reasoning == "r"


def test_long_arguments_flow_before_the_call_ends() -> None:
    request, _, converted = convert("chat", V41)
    parser = OutputParser(
        request.chunk_generator(converted, "id", "m"),
        converted.parsing_options,
        TOKENIZER,
        eos_token_ids=[EOS],
        prompt_tokens=1,
        exact=False,
    )
    ids = byte_ids(f"r</think>{block(V41, [('a', 'x' * 5000)])}")
    seen = 0
    for i in ids[:2500]:
        for chunk in parser.feed(TokenDelta("r", [i])):
            delta = json.loads(chunk.to_json())["choices"][0]["delta"]
            seen += sum(len(c["function"].get("arguments") or "") for c in delta.get("tool_calls") or ())
    assert seen > 2300  # half of the call is out, and it is not closed


def _fresh(exact: bool, own: bool = False, **change: Any) -> OutputParser:
    request, _, converted = convert("chat", V41, thinking={"type": "disabled"}, **change)
    return OutputParser(
        request.chunk_generator(converted, "id", "m"),
        converted.parsing_options,
        TOKENIZER,
        eos_token_ids=[EOS],
        prompt_tokens=7,
        exact=exact,
        detokenizer=PROMPTS.stream_detokenizer() if own else None,
    )


def _texts(parser: OutputParser, delta: TokenDelta) -> list[Any]:
    return [json.loads(chunk.to_json()) for chunk in parser.feed(delta)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_a_stop_string_counts_with_the_own_detokeniser(size: int) -> None:
    ids = byte_ids("one é ENDtwo")
    parser = _fresh(True, own=True, stop=["END"])
    text = ""
    for start in range(0, len(ids), size):
        for document in _texts(parser, TokenDelta("r", ids[start : start + size])):
            text += document["choices"][0]["delta"].get("content") or ""
    assert parser.finished and parser.tokens == len("one é END".encode()) and text == "one é "


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_a_stop_string_ends_everything_at_its_last_token(size: int) -> None:
    ids = byte_ids("one ENDtwo")
    parser = _fresh(True, stop=["END"], logprobs=True, top_logprobs=1)
    text, entries = "", 0
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        logprobs = [TokenLogprobs(i, -0.5, 1, ((i, -0.5),)) for i in part]
        for document in _texts(parser, TokenDelta("r", part, logprobs=logprobs)):
            choice = document["choices"][0]
            text += choice["delta"].get("content") or ""
            entries += len((choice["logprobs"] or {}).get("content") or ())
    assert parser.finished and parser.tokens == len("one END")
    assert (text, entries) == ("one ", len("one "))
    assert parser.feed(TokenDelta("r", ids, FinishReason.LENGTH)) == []  # and nothing more comes


def test_the_end_of_sequence_counts_and_has_no_text() -> None:
    for exact, own in itertools.product((False, True), repeat=2):
        parser = _fresh(exact, own)
        documents = _texts(parser, TokenDelta("r", [*byte_ids("hi"), EOS], FinishReason.STOP))
        assert "".join(d["choices"][0]["delta"].get("content") or "" for d in documents) == "hi"
        assert documents[-1]["choices"][0]["finish_reason"] == "stop" and parser.tokens == 3


def test_a_stop_token_of_the_request_has_no_text_either() -> None:
    stop = byte_ids("!")[0]
    parser = _fresh(False)
    documents = _texts(parser, TokenDelta("r", [*byte_ids("hi"), stop], FinishReason.STOP, stop))
    assert "".join(d["choices"][0]["delta"].get("content") or "" for d in documents) == "hi"
    assert parser.tokens == 3


@settings(max_examples=60, deadline=None)
@given(
    thought=st.lists(st.integers(11, 500), max_size=40),
    said=st.lists(st.integers(11, 500), max_size=10),
    ends=st.booleans(),
    own=st.booleans(),
)
def test_reasoning_is_counted_by_its_tokens(
    thought: list[int], said: list[int], ends: bool, own: bool
) -> None:
    """Any tokens, also those whose text the recipe's parser holds back, and then counts twice."""
    end = ids_of("</think>")[0]
    assert _reasoning_tokens([*thought, end, *said] if ends else thought, own) == len(thought)


@pytest.mark.parametrize("own", [False, True])
def test_a_tool_tag_ends_the_reasoning(own: bool) -> None:
    """Equal tokens in a row, which the recipe may miss, and a tag, whose "<" it holds back."""
    thought = ids_of("well, well, a a a a call")
    call = '<｜DSML｜ tool_calls>\n<｜DSML｜ invoke name="f">\n</｜DSML｜ invoke>\n</｜DSML｜ tool_calls>'
    assert _reasoning_tokens([*thought, *ids_of(call)], own) == len(thought)


def test_accepted_drafts_are_in_usage_as_far_as_they_count() -> None:
    """The stop string ends inside the second delta: of its three drafts one is still part of the answer."""
    request, _, converted = convert("chat", V41, stop=["STOP"])
    parser = OutputParser(
        request.chunk_generator(converted, "id", "m"),
        converted.parsing_options,
        TOKENIZER,
        eos_token_ids=[EOS],
        prompt_tokens=1,
        exact=True,
    )
    encoder = ChatEncoder(True)
    end, stop, said = ids_of("</think>"), ids_of("STOP"), ids_of("one")
    rest = ids_of(" and more")
    for ids, accepted in ((end, 0), (said, len(said) - 1), ([*stop, *rest], len([*stop, *rest]) - 1)):
        encoder.encode(0, parser.feed(TokenDelta("r", ids, accepted_draft_tokens=accepted)), parser)
    assert parser.finished and parser.tokens == len([*end, *said, *stop])
    usage = json.loads(encoder.finish().split(b"\n")[0].removeprefix(b"data: "))["usage"]
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == len(said) - 1 + len(stop)


def _reasoning_tokens(ids: list[int], own: bool) -> int:
    request, _, converted = convert("chat", V41)
    parser = OutputParser(
        request.chunk_generator(converted, "id", "m"),
        converted.parsing_options,
        TOKENIZER,
        eos_token_ids=[EOS],
        prompt_tokens=1,
        exact=False,
        end_of_reasoning=ids_of("</think>")[0],
        markup=ids_of("｜DSML｜")[0],
        detokenizer=PROMPTS.stream_detokenizer() if own else None,
    )
    encoder = ChatEncoder(True)
    for token in ids:
        encoder.encode(0, parser.feed(TokenDelta("r", [token])), parser)
    encoder.encode(0, parser.feed(TokenDelta("r", (), FinishReason.STOP)), parser)
    usage = json.loads(encoder.finish().split(b"\n")[0].removeprefix(b"data: "))["usage"]
    counted: int = usage["completion_tokens_details"]["reasoning_tokens"]
    return counted


def test_a_failure_without_tokens_begins_no_answer() -> None:
    parser = _fresh(False)
    assert parser.feed(TokenDelta("r", (), FinishReason.ERROR, error="x")) == []
    assert not parser.finished


def test_usage_has_the_cached_tokens_of_the_first_delta() -> None:
    parser = _fresh(False)
    _texts(parser, TokenDelta("r", byte_ids("hi"), cached_tokens=5))
    documents = _texts(parser, TokenDelta("r", (), FinishReason.STOP, cached_tokens=5))
    assert documents[-1]["usage"]["prompt_tokens"] == 7 and parser.cached_tokens == 5
    assert documents[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 5


def test_a_deltas_boundary_inside_a_character_is_invisible() -> None:
    ids = byte_ids("a😀b漢")
    for split, own in itertools.product(range(len(ids) + 1), (False, True)):
        parser = _fresh(False, own)
        documents = _texts(parser, TokenDelta("r", ids[:split])) if split else []
        documents += _texts(parser, TokenDelta("r", ids[split:], FinishReason.STOP))
        assert "".join(d["choices"][0]["delta"].get("content") or "" for d in documents) == "a😀b漢"
