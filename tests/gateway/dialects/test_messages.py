"""Messages, driven by Anthropic's own client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.gateway.harness import MODEL, Gateway, call, calls, events, ids_of, running
from vllm_deepinfer.engine import ConstraintKind

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI: Any = [{"role": "user", "content": "hi"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ASK: Any = {"model": MODEL, "max_tokens": 500, "messages": HI}
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


async def test_thinking_text_and_usage(gateway: Gateway) -> None:
    message = await gateway.anthropic.messages.create(**ASK)
    assert [block.type for block in message.content] == ["thinking", "text"]
    thinking, text = message.content
    assert thinking.type == "thinking" and thinking.thinking == "hmm" and thinking.signature
    assert text.type == "text" and text.text == "Hello there."
    assert message.stop_reason == "end_turn" and message.stop_sequence is None
    prompt = len(gateway.script.requests[0].prompt_token_ids)
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == prompt
    assert usage.output_tokens == 11


async def test_cached_tokens_are_reported_apart() -> None:
    async with running() as gateway:
        first = await gateway.anthropic.messages.create(**ASK)
        second = await gateway.anthropic.messages.create(**ASK)
        assert first.usage.cache_read_input_tokens == 0 and second.usage.cache_read_input_tokens == 32
        assert second.usage.input_tokens == first.usage.input_tokens - 32


async def test_without_thinking_there_is_one_text_block(gateway: Gateway) -> None:
    gateway.script.texts = ["Just text."]
    message = await gateway.anthropic.messages.create(**ASK, thinking={"type": "disabled"})
    assert [block.type for block in message.content] == ["text"]
    assert gateway.prompt().endswith("<｜Assistant｜></think>")


async def test_parallel_tool_use(gateway: Gateway) -> None:
    block = calls(("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"}))
    gateway.script.texts = [f"r</think>Let me look.{block}"]
    message = await gateway.anthropic.messages.create(**ASK, tools=[WEATHER])
    assert message.stop_reason == "tool_use"
    assert [b.type for b in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [b.input for b in message.content if b.type == "tool_use"] == [{"city": "Paris"}, {"city": "Rome"}]


async def test_a_tool_call_without_text_has_no_empty_block(gateway: Gateway) -> None:
    gateway.script.texts = ["r</think>" + call("get_weather", city="Paris")]
    message = await gateway.anthropic.messages.create(**ASK, tools=[WEATHER])
    assert [b.type for b in message.content] == ["thinking", "tool_use"]


async def test_a_tool_loop_keeps_thinking_and_results(gateway: Gateway) -> None:
    gateway.script.texts = ["why</think>ok" + call("get_weather", city="Paris"), "r</think>Sunny."]
    first = await gateway.anthropic.messages.create(**ASK, tools=[WEATHER])
    use = next(block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sun"}]}
    turns: Any = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = await gateway.anthropic.messages.create(**ASK | {"messages": turns}, tools=[WEATHER])
    assert second.content[-1].type == "text" and second.content[-1].text == "Sunny."
    prompt = gateway.prompt()
    assert "<think>why</think>ok" in prompt and "<tool_result>sun</tool_result>" in prompt


@pytest.mark.parametrize("tokens_per_step", [1, 4])
async def test_stop_sequences(tokens_per_step: int) -> None:
    async with running("r</think>one END two", tokens_per_step=tokens_per_step) as gateway:
        message = await gateway.anthropic.messages.create(**ASK, stop_sequences=["END"])
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
        assert message.content[-1].type == "text" and message.content[-1].text == "one "
        decode = gateway.app.core.runner.prompts.decode
        ids = ids_of("r</think>one END two")
        spent = next(n for n in range(1, len(ids)) if "END" in decode(ids[:n]))
        assert message.usage.output_tokens == spent


async def test_max_tokens_is_a_stop_reason(gateway: Gateway) -> None:
    message = await gateway.anthropic.messages.create(**ASK | {"max_tokens": 3})
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 3


async def test_a_stream_accumulates_to_the_same_message(gateway: Gateway) -> None:
    gateway.script.texts = ["r</think>ok" + call("get_weather", city="Paris 2>&1")]
    async with gateway.anthropic.messages.stream(**ASK, tools=[WEATHER]) as stream:
        final = await stream.get_final_message()
    assert [b.type for b in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[-1].type == "tool_use" and final.content[-1].input == {"city": "Paris 2>&1"}
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens == len(ids_of(gateway.script.texts[0])) + 1


async def test_events_nest_and_validate(gateway: Gateway) -> None:
    gateway.script.texts = ["r</think>ok" + call("get_weather", city="Paris")]
    answer = await gateway.http.post("/v1/messages", json=ASK | {"stream": True, "tools": [WEATHER]})
    open_block, indices = None, []
    for name, data in events(answer.text):
        assert name == data["type"]
        if name == "ping":
            continue
        EVENT.validate_python(data)
        if name == "content_block_start":
            assert open_block is None
            open_block = data["index"]
            indices.append(open_block)
        elif name == "content_block_delta":
            assert data["index"] == open_block
        elif name == "content_block_stop":
            assert data["index"] == open_block
            open_block = None
    assert indices == [0, 1, 2] and open_block is None
    names = [name for name, _ in events(answer.text)]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]


async def test_a_forced_choice_constrains_the_answer(gateway: Gateway) -> None:
    gateway.script.texts = ["r</think>" + call("get_weather", city="Paris")]
    await gateway.anthropic.messages.create(
        **ASK, tools=[WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True}
    )
    structured = gateway.script.requests[0].sampling.structured
    assert structured is not None and structured.kind is ConstraintKind.STRUCTURAL_TAG
    assert structured.after_reasoning
    grammar = json.loads(structured.value)["format"]
    assert grammar["type"] == "sequence" and grammar["elements"][1]["stop_after_first"] is True


@pytest.mark.parametrize("field", ["output_config", "output_format"])
async def test_an_output_schema_is_shown_and_enforced(gateway: Gateway, field: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "schema": schema}
    gateway.script.texts = ['r</think>{"a": 1}']
    body = ASK | {field: {"format": wanted} if field == "output_config" else wanted}
    answer = await gateway.http.post("/v1/messages", json=body)
    Message.model_validate(answer.json())
    structured = gateway.script.requests[0].sampling.structured
    assert structured is not None and structured.kind is ConstraintKind.JSON_SCHEMA
    assert json.loads(structured.value) == schema and structured.after_reasoning
    assert json.dumps(schema) in gateway.prompt()


async def test_system_prompt_and_cache_control_blocks(gateway: Gateway) -> None:
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    await gateway.anthropic.messages.create(**ASK, system=system, extra_body={"temperature": 0.0, "top_k": 3})
    assert "Be brief.<｜User｜>hi" in gateway.prompt()
    sampling = gateway.script.requests[0].sampling
    assert (sampling.temperature, sampling.top_k) == (0.0, 3)


async def test_count_tokens_is_the_length_of_the_prompt(gateway: Gateway) -> None:
    ask = {"model": MODEL, "messages": HI, "tools": [WEATHER], "system": "Be brief."}
    count = await gateway.anthropic.messages.count_tokens(**ask)  # type: ignore[arg-type]
    await gateway.anthropic.messages.create(max_tokens=5, **ask)  # type: ignore[call-overload]
    assert count.input_tokens == len(gateway.script.requests[0].prompt_token_ids)


async def test_models(gateway: Gateway) -> None:
    listed = await gateway.anthropic.models.list()
    assert [model.id for model in listed.data] == [MODEL, "alias"]
    assert (await gateway.anthropic.models.retrieve("alias")).display_name == "alias"


@pytest.mark.parametrize(
    ("change", "status", "kind", "says"),
    [
        ({"model": "claude"}, 404, "not_found_error", "'claude' does not exist here"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"mcp_servers": [{}]}, 400, "invalid_request_error", "calls no MCP servers"),
        ({"stop_sequence": ["x"]}, 400, "invalid_request_error", "did you mean stop_sequences?"),
        ({"output_format": {"type": "xml"}}, 400, "invalid_request_error", "json_schema"),
        ({"messages": "hi"}, 400, "invalid_request_error", "messages: send a list"),
        ({"max_tokens": 10**6}, 400, "invalid_request_error", "max_tokens: send a whole number from 1 to "),
        ({"stop": ["x"]}, 400, "invalid_request_error", "use stop_sequences."),
        ({"logprobs": True}, 400, "invalid_request_error", "use Chat Completions."),
    ],
)
async def test_errors_have_anthropics_envelope(
    gateway: Gateway, change: dict[str, Any], status: int, kind: str, says: str
) -> None:
    answer = await gateway.http.post("/v1/messages", json=ASK | change)
    assert answer.status_code == status
    body = answer.json()
    assert body["type"] == "error" and body["error"]["type"] == kind and says in body["error"]["message"]
    assert body["request_id"] == answer.headers["request-id"]


async def test_an_error_in_the_stream_reaches_the_client() -> None:
    async with running() as gateway:
        gateway.engine.faults.fail_requests[1] = 4
        with pytest.raises(anthropic.APIStatusError):
            async with gateway.anthropic.messages.stream(**ASK) as stream:
                await stream.get_final_message()
