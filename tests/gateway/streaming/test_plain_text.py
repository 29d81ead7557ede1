"""Plain text that goes past the parser gives the very events that it would have given."""

from __future__ import annotations

import asyncio
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import pytest
from deepseek_recipe import ChatCompletionRequest, ConversationRequest, ConversionOptions, Tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_deepinfer.engine import FinishReason, TokenDelta
from vllm_deepinfer.gateway.dialects.chat import ChatEncoder
from vllm_deepinfer.gateway.metrics import GatewayMetrics
from vllm_deepinfer.gateway.streaming.exchange import Account, Choice, StreamExchange
from vllm_deepinfer.gateway.streaming.lane import Lane
from vllm_deepinfer.gateway.streaming.parser import Chunk, OutputParser
from vllm_deepinfer.gateway.streaming.sse import Message, SseWriter
from vllm_deepinfer.gateway.tokens import PromptTokenizer

EOS = 1
WORDS = [" the", "Hello", " world", "中文", ",", ".", " 12", "_", "'s", " 😀"]
MARKUP = [
    *(
        "<",
        "</",
        "think",
        ">",
        "</think>",
        "<think>",
        "｜DSML｜",
        " calls",
        " invoke",
        " name",
        "=",
        '"',
        "\\",
    ),
    *("\n", "\n\n", "{", "}", "[", "```", "json", "<｜", "｜>", "end", "stop", "\t", "&", "2>&1"),
]
TOOL = '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="x" string="true">a b c'
TOOL += "</｜DSML｜ parameter>"
TOOL += "\n</｜DSML｜ invoke>\n</｜DSML｜ calls>"


class Setting:
    """Tokenizers, with a repr that hypothesis can print."""

    def __init__(self) -> None:
        path = Path(str(files("tests.gateway") / "data" / "tokenizer.json"))
        self.prompts = PromptTokenizer.from_file(path)
        self.output = Tokenizer.from_file(str(path))
        control = self.prompts.vocabulary.control_ids
        self.control = {control[text] for text in ("<think>", "</think>", "｜DSML｜")}

    def ids(self, text: str) -> list[int]:
        """As a model writes it: thinking and tool markup as control tokens."""
        ids: list[int] = self.output.encode(text)
        return ids


class CountingParser(OutputParser):
    """Counts what does not go past it."""

    fed_deltas = 0

    def feed(self, delta: TokenDelta) -> list[Chunk]:
        self.fed_deltas += 1
        return super().feed(delta)


class Sent:
    """A response body."""

    body = b""

    async def send(self, message: Message) -> None:
        self.body += message.get("body", b"")


class SentLane:
    """A lane to a response body: what it is given to write, and frames without their chunk coding."""

    quick = True

    def __init__(self, sent: Sent) -> None:
        self._sent = sent

    def write(self, body: bytes) -> bool:
        self._sent.body += body
        return True

    def frame(self, frame: bytes) -> None:
        head, _, rest = frame.partition(b"\r\n")
        assert int(head, 16) == len(rest) - 2 and rest.endswith(b"\r\n")
        self.write(rest[:-2])


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting()


def converted(thinking: bool, with_tools: bool = True, **fields: Any) -> ConversationRequest:
    body = {"model": "DeepSeek-V4.1-Flash", "stream": True, "messages": [{"role": "user", "content": "json"}]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body |= {"thinking": {"type": "enabled" if thinking else "disabled"}, **fields}
    if with_tools:
        body["tools"] = tools
    return ChatCompletionRequest(body).convert(ConversionOptions())


def stream(
    setting: Setting, request: ConversationRequest, deltas: list[TokenDelta], fast: bool
) -> tuple[bytes, int]:
    """All events, and how many tokens went past the parser."""
    events, past = asyncio.run(_stream(setting, request, deltas, fast, with_lane=False))
    on_lane, past_on_lane = asyncio.run(_stream(setting, request, deltas, fast, with_lane=True))
    assert (masked(on_lane), past_on_lane) == (masked(events), past)
    return events, past


async def _stream(
    setting: Setting, request: ConversationRequest, deltas: list[TokenDelta], fast: bool, with_lane: bool
) -> tuple[bytes, int]:
    parser = CountingParser(
        ChatCompletionRequest.chunk_generator(request, "chatcmpl-1", "m"),
        request.parsing_options,
        setting.output,
        eos_token_ids=[EOS],
        prompt_tokens=3,
        exact=False,
        detokenizer=setting.prompts.stream_detokenizer(),
    )
    encoder, sent = ChatEncoder(True), Sent()
    lane = SentLane(sent) if with_lane else None
    writer = SseWriter(sent.send, lane=cast(Lane | None, lane))
    exchange = StreamExchange(GatewayMetrics(), Account(received=0.0), 1, encoder, writer, headers=())
    choice = Choice("r", 0, parser, exchange)
    delivered = 0
    for delta in deltas:
        if not fast:
            choice.unsteady()
        delivered += 1
        frame = choice.quick(delta, float(delivered))
        if frame is not None:
            assert lane is not None
            lane.frame(frame)
        elif choice.deliver(delta, float(delivered)):
            break
    assert parser.finished and choice.settle() == parser.tokens
    return sent.body + encoder.finish(), delivered - parser.fed_deltas


def deltas_of(ids: list[int], reason: FinishReason = FinishReason.STOP) -> list[TokenDelta]:
    return [TokenDelta("r", [token]) for token in ids] + [TokenDelta("r", [EOS], reason)]


def masked(events: bytes) -> list[Any]:
    """Events without the time of their making and the ids of tool calls, which are random."""
    text = re.sub(r'"call_\w+"', '"call"', events.decode())
    lines = [line[6:] for line in text.split("\n\n") if line]
    return [json.loads(line) | {"created": 0} if line != "[DONE]" else line for line in lines]


TEXTS = st.lists(st.sampled_from(WORDS) | st.sampled_from(MARKUP) | st.just(TOOL), max_size=25).map("".join)


@settings(deadline=None, max_examples=300)
@given(text=TEXTS, thinking=st.booleans(), tools=st.booleans(), cut=st.integers(0, 3))
def test_the_same_events_with_and_without(
    setting: Setting, text: str, thinking: bool, tools: bool, cut: int
) -> None:
    request = converted(thinking, tools)
    ids = setting.ids(text)
    deltas = deltas_of(
        ids[: len(ids) - cut] if cut else ids, FinishReason.LENGTH if cut else FinishReason.STOP
    )
    slow, none_past = stream(setting, request, deltas, fast=False)
    fast, _ = stream(setting, request, deltas, fast=True)
    assert masked(fast) == masked(slow)
    assert none_past == 0


@settings(deadline=None, max_examples=150)
@given(ids=st.lists(st.integers(2, 1023), max_size=40), thinking=st.booleans(), tools=st.booleans())
def test_the_same_events_for_any_tokens(
    setting: Setting, ids: list[int], thinking: bool, tools: bool
) -> None:
    """Halves of characters, control tokens in odd places, anything that a model may sample."""
    request = converted(thinking, tools)
    size = len(setting.prompts.decode([5]) and setting.prompts._detokenizer.bytes_of)
    deltas = deltas_of([token % (size - 2) + 2 for token in ids])
    fast, _ = stream(setting, request, deltas, fast=True)
    slow, _ = stream(setting, request, deltas, fast=False)
    assert without_reasoning_tokens(masked(fast)) == without_reasoning_tokens(masked(slow))


def without_reasoning_tokens(events: list[Any]) -> list[Any]:
    """The recipe counts a token twice whose text it held back for a while, such as a stray control token."""
    events[-2]["usage"].pop("completion_tokens_details", None)
    return events


@settings(deadline=None, max_examples=100)
@given(text=TEXTS, sizes=st.lists(st.integers(1, 4), min_size=1, max_size=60))
def test_the_same_events_when_steps_bring_several_tokens(
    setting: Setting, text: str, sizes: list[int]
) -> None:
    request, ids = converted(False), setting.ids(text)
    deltas: list[TokenDelta] = []
    while ids:
        size = sizes[len(deltas) % len(sizes)]
        deltas.append(TokenDelta("r", ids[:size]))
        ids = ids[size:]
    deltas.append(TokenDelta("r", [EOS], FinishReason.STOP))
    fast, _ = stream(setting, request, deltas, fast=True)
    slow, _ = stream(setting, request, deltas, fast=False)
    assert _joined(masked(fast)) == _joined(masked(slow))


def _joined(events: list[Any]) -> Any:
    """Text per kind, tool calls and usage: several tokens may be cut into events in more than one way."""
    text: dict[str, str] = {"content": "", "reasoning_content": "", "arguments": ""}
    for event in events[:-1]:
        for choice in event["choices"]:
            delta = choice["delta"]
            for kind in ("content", "reasoning_content"):
                text[kind] += delta.get(kind) or ""
            for call in delta.get("tool_calls") or ():
                text["arguments"] += (call["function"].get("name") or "") + (
                    call["function"]["arguments"] or ""
                )
    return text, events[-2]["usage"], events[-1]


def test_prose_goes_past(setting: Setting) -> None:
    ids = setting.ids("the world is round and we go round it" * 3)
    events, past = stream(setting, converted(False), deltas_of(ids), fast=True)
    assert past == len(ids) - 1  # the first starts the answer and shows the form
    usage = masked(events)[-2]["usage"]
    assert usage["completion_tokens"] == len(ids) + 1


def test_reasoning_tokens_are_counted_as_reasoning(setting: Setting) -> None:
    ids = setting.ids("let me think about it now</think>the answer is four")
    events, past = stream(setting, converted(True), deltas_of(ids), fast=True)
    assert past > 5
    slow, _ = stream(setting, converted(True), deltas_of(ids), fast=False)
    assert masked(events)[-2]["usage"] == masked(slow)[-2]["usage"]
    assert masked(slow)[-2]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 5


@pytest.mark.parametrize("fields", [{"stop": ["round"]}, {"response_format": {"type": "json_object"}}])
def test_stop_strings_and_json_go_through_the_parser(setting: Setting, fields: dict[str, Any]) -> None:
    ids = setting.ids("the world is round")
    _, past = stream(setting, converted(False, **fields), deltas_of(ids), fast=True)
    assert past == 0


def test_text_behind_something_held_back_waits_for_it(setting: Setting) -> None:
    """`<` is held back until the next token shows that it starts nothing."""
    ids = setting.ids("one two<three four five")
    events, _ = stream(setting, converted(False), deltas_of(ids), fast=True)
    content = "".join(
        choice["delta"].get("content") or "" for event in masked(events)[:-1] for choice in event["choices"]
    )
    assert content == "one two<three four five"


def test_line_ends_go_past_where_they_begin_nothing(setting: Setting) -> None:
    """Without tools and reasoning; else the processor holds them back, for a tool call may follow."""
    ids = setting.ids("the world\n\nis round\nand we go\nround it")
    _, past = stream(setting, converted(False, with_tools=False), deltas_of(ids), fast=True)
    assert past == len(ids) - 1
    _, past = stream(setting, converted(False), deltas_of(ids), fast=True)
    assert past < len(ids) - 3
