"""Responses, driven by OpenAI's own client, with its stored turns and background work."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.gateway.harness import MODEL, Gateway, call, calls, events, ids_of, running
from vllm_deepinfer.engine import ConstraintKind

pytestmark = pytest.mark.asyncio(loop_scope="module")

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


async def test_an_answer(gateway: Gateway) -> None:
    answer = await gateway.openai.responses.create(
        model=MODEL, input="hi", instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=100
    )
    assert answer.output_text == "Hello there." and answer.status == "completed"
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.usage is not None and answer.usage.output_tokens == 11
    assert answer.usage.output_tokens_details.reasoning_tokens == 2
    assert answer.metadata == {"a": "b"} and answer.max_output_tokens == 100
    assert answer.instructions == "Be brief." and answer.to_dict()["store"] is True
    assert "Be brief.<｜User｜>hi" in gateway.prompt()


async def test_a_stream_ends_with_the_whole_response(gateway: Gateway) -> None:
    gateway.script.texts = ["r</think>ok" + call("get_weather", city="Paris")]
    body = {"model": MODEL, "input": "hi", "stream": True, "tools": [WEATHER], "metadata": {"k": "v"}}
    answer = await gateway.http.post("/v1/responses", json=body)
    found = events(answer.text)
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    for name, data in found:
        assert name == data["type"]
        EVENT.validate_python(data)
    assert found[0][0] == "response.created" and found[0][1]["response"]["metadata"] == {"k": "v"}
    final = Response.model_validate(found[-1][1]["response"])
    assert final.status == "completed" and final.usage is not None
    assert final.usage.output_tokens == len(ids_of(gateway.script.texts[0])) + 1
    items = [item.type for item in final.output]
    assert items == ["reasoning", "message", "function_call"]
    stored = await gateway.openai.responses.retrieve(final.id)
    assert stored.to_dict() == found[-1][1]["response"]


async def test_the_clients_stream_helper(gateway: Gateway) -> None:
    async with gateway.openai.responses.stream(model=MODEL, input="hi") as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(deltas) == "Hello there." == final.output_text


async def test_a_tool_loop_through_previous_response_id(gateway: Gateway) -> None:
    block = calls(("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"}))
    gateway.script.texts = ["why</think>ok" + block, "r</think>Sunny.", "r</think>Bye."]
    ask: Any = {"model": MODEL, "tools": [WEATHER]}
    first = await gateway.openai.responses.create(input="weather?", **ask)
    used = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(item.arguments) for item in used] == [{"city": "Paris"}, {"city": "Rome"}]
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": text}
        for item, text in zip(used, ("sun", "rain"), strict=True)
    ]
    second = await gateway.openai.responses.create(input=results, previous_response_id=first.id, **ask)
    assert second.output_text == "Sunny." and second.previous_response_id == first.id
    prompt = gateway.prompt()
    # nothing of the first turn is lost: question, reasoning, text, both calls (bug class 49), both results
    assert "weather?<｜Assistant｜><think>why</think>ok" in prompt
    assert prompt.count('invoke name="get_weather"') == 2
    assert "<tool_result>sun</tool_result>" in prompt and "<tool_result>rain</tool_result>" in prompt
    third = await gateway.openai.responses.create(input="thanks", previous_response_id=second.id, **ask)
    assert third.output_text == "Bye."
    assert "Sunny.<｜end▁of▁sentence｜><｜User｜>thanks" in gateway.prompt()


async def test_instructions_are_not_inherited(gateway: Gateway) -> None:
    first = await gateway.openai.responses.create(model=MODEL, input="one", instructions="Old rules.")
    await gateway.openai.responses.create(model=MODEL, input="two", previous_response_id=first.id)
    assert "Old rules." not in gateway.prompt() and "one" in gateway.prompt()


async def test_retrieve_delete_and_input_items(gateway: Gateway) -> None:
    answer = await gateway.openai.responses.create(model=MODEL, input="hi")
    assert (await gateway.openai.responses.retrieve(answer.id)).output_text == "Hello there."
    items = await gateway.openai.responses.input_items.list(answer.id)
    (item,) = items.data
    assert item.type == "message" and item.content[0].type == "input_text" and item.content[0].text == "hi"
    await gateway.openai.responses.delete(answer.id)
    for request in (
        gateway.openai.responses.retrieve(answer.id),
        gateway.openai.responses.delete(answer.id),
        gateway.openai.responses.create(model=MODEL, input="x", previous_response_id=answer.id),
    ):
        with pytest.raises(openai.NotFoundError, match="is stored here"):
            await request


async def test_what_is_not_stored_cannot_be_found(gateway: Gateway) -> None:
    answer = await gateway.openai.responses.create(model=MODEL, input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        await gateway.openai.responses.retrieve(answer.id)


async def test_a_background_response(gateway: Gateway) -> None:
    answer = await gateway.openai.responses.create(model=MODEL, input="hi", background=True)
    assert answer.status in ("queued", "in_progress") and answer.output == []
    async with asyncio.timeout(30):
        while answer.status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
            answer = await gateway.openai.responses.retrieve(answer.id)
    assert answer.status == "completed" and answer.output_text == "Hello there." and answer.background
    with pytest.raises(openai.BadRequestError, match="completed already"):
        await gateway.openai.responses.cancel(answer.id)
    follow = await gateway.openai.responses.create(model=MODEL, input="x", previous_response_id=answer.id)
    assert follow.status == "completed"


async def test_cancelling_a_background_response_stops_the_engine() -> None:
    async with running("x " * 3000) as gateway:
        answer = await gateway.openai.responses.create(model=MODEL, input="hi", background=True)
        await asyncio.sleep(0.05)
        assert gateway.engine.load().active_requests == 1
        with pytest.raises(openai.ConflictError, match="has not ended yet"):
            await gateway.openai.responses.create(model=MODEL, input="x", previous_response_id=answer.id)
        cancelled = await gateway.openai.responses.cancel(answer.id)
        assert cancelled.status == "cancelled" and gateway.engine.load().active_requests == 0
        assert (await gateway.openai.responses.cancel(answer.id)).status == "cancelled"
        assert (await gateway.openai.responses.retrieve(answer.id)).status == "cancelled"


async def test_deleting_a_background_response_stops_the_engine() -> None:
    async with running("x " * 3000) as gateway:
        answer = await gateway.openai.responses.create(model=MODEL, input="hi", background=True)
        await asyncio.sleep(0.05)
        await gateway.openai.responses.delete(answer.id)
        await gateway.idle()
        with pytest.raises(openai.NotFoundError):
            await gateway.openai.responses.retrieve(answer.id)


async def test_a_failed_background_response_says_so() -> None:
    async with running("x " * 3000) as gateway:
        gateway.engine.faults.fail_requests[1] = 3
        answer = await gateway.openai.responses.create(model=MODEL, input="hi", background=True)
        async with asyncio.timeout(30):
            while answer.status in ("queued", "in_progress"):
                await asyncio.sleep(0.01)
                answer = await gateway.openai.responses.retrieve(answer.id)
        assert answer.status == "failed" and answer.error is not None
        assert answer.error.code == "server_error"


async def test_an_ordinary_response_cannot_be_cancelled(gateway: Gateway) -> None:
    answer = await gateway.openai.responses.create(model=MODEL, input="hi")
    with pytest.raises(openai.BadRequestError, match="background true"):
        await gateway.openai.responses.cancel(answer.id)


async def test_an_error_in_the_stream_is_an_event_and_a_failed_response() -> None:
    async with running() as gateway:
        gateway.engine.faults.fail_requests[1] = 4
        body = {"model": MODEL, "input": "hi", "stream": True}
        answer = await gateway.http.post("/v1/responses", json=body)
        found = events(answer.text)
        assert [name for name, _ in found[-2:]] == ["error", "response.failed"]
        assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
        for _, data in found:
            EVENT.validate_python(data)
        assert found[-2][1]["code"] == "engine_error"
        assert found[-1][1]["response"]["status"] == "failed"


async def test_an_error_before_the_first_event_of_a_stream_that_was_kept_open() -> None:
    async with running(keepalive_s=0.05) as gateway:
        gateway.engine.faults.fail_requests[1] = 0
        gateway.engine.faults.stall_s = 0.4
        body = {"model": MODEL, "input": "hi", "stream": True, "metadata": {"a": "b"}}
        answer = await gateway.http.post("/v1/responses", json=body)
        assert answer.text.startswith(": keep-alive\n\n")
        found = [data for _, data in events(answer.text)]
        assert [data["type"] for data in found] == ["error", "response.failed"]
        for data in found:
            EVENT.validate_python(data)
        failed = found[-1]["response"]
        assert failed["status"] == "failed" and failed["model"] == MODEL and failed["metadata"] == {"a": "b"}


async def test_incomplete_says_why(gateway: Gateway) -> None:
    answer = await gateway.openai.responses.create(model=MODEL, input="hi", max_output_tokens=3)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


async def test_logprobs(gateway: Gateway) -> None:
    answer = await gateway.openai.responses.create(
        model=MODEL, input="hi", include=["message.output_text.logprobs"], top_logprobs=2
    )
    part = answer.output[-1].content[0]  # type: ignore[union-attr, index]
    assert part.type == "output_text" and part.logprobs is not None  # type: ignore[union-attr]
    assert "".join(entry.token for entry in part.logprobs) == "Hello there."  # type: ignore[union-attr]


async def test_a_text_format_is_a_constraint(gateway: Gateway) -> None:
    schema: Any = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"x": {"enum": [1, 2]}},
    }
    text: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    answer = await gateway.openai.responses.create(model=MODEL, input="hi", text=text)
    structured = gateway.script.requests[0].sampling.structured
    assert structured is not None and structured.kind is ConstraintKind.JSON_SCHEMA
    assert json.loads(structured.value) == schema
    assert answer.text is not None and answer.text.format is not None
    assert answer.text.format.to_dict()["strict"] is True  # reported as asked for


async def test_tool_namespaces(gateway: Gateway) -> None:
    tools: Any = [
        {"type": "namespace", "name": "fs", "description": "Files.", "tools": [WEATHER | {"strict": True}]}
    ]
    gateway.script.texts = ["r</think>" + call("fs::get_weather", city="Paris")]
    body = {"model": MODEL, "input": "hi", "tools": tools}
    answer = await gateway.http.post("/v1/responses", json=body)
    item = answer.json()["output"][-1]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "fs", "get_weather")
    structured = gateway.script.requests[0].sampling.structured
    assert structured is not None and "fs::get_weather" in structured.value


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"input": 5}, 400, "input: send a string or a list of items."),
        ({"conversation": "c"}, 400, "chain turns with previous_response_id"),
        ({"background": True, "stream": True}, 400, "cannot be streamed"),
        ({"background": True, "store": False}, 400, "has to be stored"),
        ({"store": "yes"}, 400, "store: send true or false."),
        ({"metadata": {"a": 1}}, 400, "metadata: send an object of strings."),
        ({"previous_response_id": "resp_x"}, 404, "no response 'resp_x' is stored here"),
        ({"n": 2}, 400, "n: this API gives one answer"),
        ({"max_tokens": 5}, 400, "max_tokens: is not a field of this API; use max_output_tokens."),
        ({"max_output_tokens": 10**6}, 400, "max_output_tokens: send a whole number from 1 to "),
        ({"include": "logprobs"}, 400, "include: send a list of strings."),
        ({"input": [{"type": "web_search_call"}]}, 400, "input.0: there are no items of type"),
        ({"input": [{"type": ["message"]}]}, 400, "input.0: there are no items of type"),
        ({"input": [{"type": {}}]}, 400, "input.0: there are no items of type"),
        (
            {"input": [{"role": "user"}]},
            400,
            "input.0: content is missing: send a string or a list of parts.",
        ),
        ({"model": None}, 400, "model: name one of"),
        ({"tools": [{"type": "custom", "name": "x"}]}, 400, "tools: unsupported custom tool"),
    ],
)
async def test_a_mistake_gets_one_sentence(
    gateway: Gateway, change: dict[str, Any], status: int, says: str
) -> None:
    answer = await gateway.http.post("/v1/responses", json={"model": MODEL, "input": "hi"} | change)
    assert answer.status_code == status and says in answer.json()["error"]["message"], answer.text
