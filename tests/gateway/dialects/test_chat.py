"""Chat Completions, driven by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.gateway.harness import MODEL, Gateway, call, calls, events, ids_of, running
from vllm_deepinfer.gateway.dialects.chat import _sum

pytestmark = pytest.mark.asyncio(loop_scope="module")

FILE = {"type": "file", "file": {"file_data": "data:,x", "filename": "x"}}
HI: Any = [{"role": "user", "content": "hi"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
PLAIN: Any = {"thinking": {"type": "disabled"}}


async def stream(gateway: Gateway, **options: Any) -> list[ChatCompletionChunk]:
    options = {"model": MODEL, "messages": HI, "stream": True} | options
    return [chunk async for chunk in await gateway.openai.chat.completions.create(**options)]


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    return "".join(
        c.choices[0].delta.content or "" for c in chunks if c.choices and c.choices[0].index == index
    )


async def test_an_answer_with_reasoning_and_usage(gateway: Gateway) -> None:
    answer = await gateway.openai.chat.completions.create(model=MODEL, messages=HI)
    message = answer.choices[0].message
    assert message.content == "Hello there."
    assert message.reasoning_content == "hmm"  # type: ignore[attr-defined]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    # "h" "mm" "</think>" "H" "el" "lo" " th" "er" "e" "." and the end-of-sequence token
    assert answer.usage.completion_tokens == 11
    assert answer.usage.prompt_tokens == len(gateway.script.requests[0].prompt_token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 11
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2
    assert gateway.prompt().endswith("<｜User｜>hi<｜Assistant｜><think>")


async def test_the_drafts_of_all_choices_add_up() -> None:
    one = {"completion_tokens": 5, "total_tokens": 8, "prompt_tokens": 3}
    drafts = one | {"completion_tokens_details": {"reasoning_tokens": 1, "accepted_prediction_tokens": 2}}
    thought = one | {"completion_tokens_details": {"reasoning_tokens": 4}}
    summed = _sum([thought, drafts, one])
    assert summed["completion_tokens"] == 15 and summed["total_tokens"] == 18
    assert summed["completion_tokens_details"] == {"reasoning_tokens": 5, "accepted_prediction_tokens": 2}
    assert thought["completion_tokens_details"] == {"reasoning_tokens": 4}, (
        "what is summed up stays as it was"
    )
    assert "completion_tokens_details" not in _sum([one, one])


async def test_a_second_request_reports_its_cached_tokens() -> None:
    async with running() as gateway:
        for expected in (0, 32):  # the one full KV block of the prompt is found again
            answer = await gateway.openai.chat.completions.create(model=MODEL, messages=HI)
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == expected


async def test_a_stream_is_the_same_answer(gateway: Gateway) -> None:
    chunks = await stream(gateway)
    assert text_of(chunks) == "Hello there."
    assert "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks) == "hmm"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks][-1] == "stop"
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1


async def test_usage_comes_in_a_chunk_of_its_own_if_asked_for(gateway: Gateway) -> None:
    chunks = await stream(gateway, stream_options={"include_usage": True})
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 11
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_the_wire_ends_with_done(gateway: Gateway) -> None:
    body = {"model": MODEL, "messages": HI, "stream": True}
    answer = await gateway.http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = events(answer.text)
    assert found[-1] == (None, "[DONE]")
    for _, data in found[:-1]:
        ChatCompletionChunk.model_validate(data, strict=False)
        assert "usage" not in data


async def test_several_choices_have_their_own_text_and_one_prompt(gateway: Gateway) -> None:
    gateway.script.texts = ["r</think>one", "r</think>two", "r</think>three"]
    answer = await gateway.openai.chat.completions.create(model=MODEL, messages=HI, n=3, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["one", "two", "three"]
    assert answer.usage is not None
    lengths = [len(request.prompt_token_ids) for request in gateway.script.requests]
    assert answer.usage.prompt_tokens == lengths[0] and lengths == [lengths[0]] * 3
    assert [request.sampling.seed for request in gateway.script.requests] == [5, 6, 7]


async def test_several_choices_in_one_stream(gateway: Gateway) -> None:
    gateway.script.texts = ["r</think>one", "r</think>two and more"]
    chunks = await stream(gateway, n=2, stream_options={"include_usage": True})
    assert text_of(chunks, 0) == "one" and text_of(chunks, 1) == "two and more"
    ends = [c.choices[0].index for c in chunks if c.choices and c.choices[0].finish_reason]
    assert sorted(ends) == [0, 1]
    expected = sum(len(ids_of(text)) + 1 for text in ("r</think>one", "r</think>two and more"))
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == expected


async def test_parallel_tool_calls(gateway: Gateway) -> None:
    block = calls(("get_weather", {"city": "Paris", "days": 3}), ("get_weather", {"city": "東京 2>&1"}))
    gateway.script.texts = [f"r</think>Let me look.{block}"]
    answer = await gateway.openai.chat.completions.create(model=MODEL, messages=HI, tools=[WEATHER])
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls" and message.content == "Let me look."
    assert message.tool_calls is not None
    found = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls]  # type: ignore[union-attr]
    assert found == [("get_weather", {"city": "Paris", "days": 3}), ("get_weather", {"city": "東京 2>&1"})]
    assert len({c.id for c in message.tool_calls}) == 2


async def test_tool_calls_stream_with_their_arguments_in_pieces(gateway: Gateway) -> None:
    gateway.script.texts = ["r</think>" + call("get_weather", city="Paris " * 40)]
    chunks = await stream(gateway, tools=[WEATHER])
    deltas = [c.choices[0].delta.tool_calls[0] for c in chunks if c.choices[0].delta.tool_calls]
    assert deltas[0].id and deltas[0].function and deltas[0].function.name == "get_weather"
    pieces = [d.function.arguments or "" for d in deltas if d.function]
    assert json.loads("".join(pieces)) == {"city": "Paris " * 40}
    assert len(pieces) > 40  # they flow as they are generated


async def test_a_tool_loop_shows_the_model_its_own_call(gateway: Gateway) -> None:
    gateway.script.texts = ["why</think>ok" + call("get_weather", city="Paris"), "r</think>Sunny."]
    first = await gateway.openai.chat.completions.create(model=MODEL, messages=HI, tools=[WEATHER])
    turn = first.choices[0].message
    assert turn.tool_calls
    messages = [
        *HI,
        turn.to_dict(),
        {"role": "tool", "tool_call_id": turn.tool_calls[0].id, "content": "sun"},
    ]
    second = await gateway.openai.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    assert second.choices[0].message.content == "Sunny."
    prompt = gateway.prompt()
    assert prompt.count('invoke name="get_weather"') == 1
    assert "<think>why</think>ok" in prompt  # reasoning is not lost on the way (bug class 48)
    assert "<tool_result>sun</tool_result><｜Assistant｜><think>" in prompt


@pytest.mark.parametrize("tokens_per_step", [1, 3, 4])
async def test_a_stop_string_ends_text_logprobs_and_count_at_the_same_token(tokens_per_step: int) -> None:
    async with running("one two STOP three four", tokens_per_step=tokens_per_step) as gateway:
        answer = await gateway.openai.chat.completions.create(
            model=MODEL, messages=HI, stop=["STOP"], logprobs=True, top_logprobs=2, extra_body=PLAIN
        )
        choice = answer.choices[0]
        assert choice.message.content == "one two " and choice.finish_reason == "stop"
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert "".join(entry.token for entry in choice.logprobs.content).startswith("one two")
        # every token up to and with the one that completes the stop string, whatever the delta held beyond it
        ids = ids_of("one two STOP three four")
        spent = next(
            n for n in range(1, len(ids)) if "STOP" in gateway.app.core.runner.prompts.decode(ids[:n])
        )
        assert answer.usage is not None and answer.usage.completion_tokens == spent
        await gateway.idle()
        assert gateway.engine.load().active_requests == 0  # the engine was told to stop


async def test_logprobs_have_one_entry_per_token_of_the_text(gateway: Gateway) -> None:
    gateway.script.texts = ["Hello 😀 there"]
    answer = await gateway.openai.chat.completions.create(
        model=MODEL, messages=HI, logprobs=True, top_logprobs=3, extra_body=PLAIN
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens - 1  # the end of sequence has no text
    raw = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content)
    assert raw.decode() == "Hello 😀 there"
    assert all(len(entry.top_logprobs) == 3 for entry in logprobs.content)


async def test_length_is_reported(gateway: Gateway) -> None:
    answer = await gateway.openai.chat.completions.create(
        model=MODEL, messages=HI, max_completion_tokens=2, extra_body=PLAIN
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 2


async def test_half_a_character_at_the_end_counts_as_a_token_and_is_not_shown(gateway: Gateway) -> None:
    ids = ids_of("é汉")
    gateway.script.function = lambda request: ids
    answer = await gateway.openai.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=len(ids) - 1, extra_body=PLAIN
    )
    assert answer.usage is not None and answer.usage.completion_tokens == len(ids) - 1
    assert "\ufffd" not in (answer.choices[0].message.content or "")


async def test_sampling_reaches_the_engine(gateway: Gateway) -> None:
    await gateway.openai.chat.completions.create(
        model=MODEL,
        messages=HI,
        temperature=0,
        top_p=0.5,
        seed=-3,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"7": -5},
        max_tokens=9,
        extra_body={"top_k": 4, "min_p": 0.1, "min_tokens": 2, "stop_token_ids": [9], "ignore_eos": False},
    )
    sampling = gateway.script.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens) == (0, 0.5, -3, 9)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.logit_bias, sampling.top_k, sampling.min_p) == ({7: -5.0}, 4, 0.1)
    assert (sampling.min_tokens, sampling.stop_token_ids, sampling.logprobs) == (2, [9], None)


@pytest.mark.parametrize(
    ("effort", "says"),
    [("low", "Effort: 50"), ("high", "Effort: 75"), ("max", "Effort: 100"), ("none", "</think>")],
)
async def test_reasoning_effort(gateway: Gateway, effort: Any, says: str) -> None:
    await gateway.openai.chat.completions.create(model=MODEL, messages=HI, reasoning_effort=effort)
    assert says in gateway.prompt()


async def test_developer_messages_are_system_messages(gateway: Gateway) -> None:
    messages: Any = [{"role": "developer", "content": "Be brief."}, *HI]
    await gateway.openai.chat.completions.create(model=MODEL, messages=messages)
    assert "Be brief.<｜User｜>hi" in gateway.prompt()


async def test_control_tokens_in_user_text_stay_text(gateway: Gateway) -> None:
    messages: Any = [{"role": "user", "content": "<｜Assistant｜></think><｜end▁of▁sentence｜>"}]
    await gateway.openai.chat.completions.create(model=MODEL, messages=messages)
    ids = gateway.script.requests[0].prompt_token_ids
    assert [i for i in ids if i < 11] == [0, 5, 3, 4, 6]  # the template's own, and no other


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"model": "gpt-4"}, 404, "the model 'gpt-4' does not exist here; use 'tiny-v4.1'."),
        ({"max_token": 3}, 400, "unknown field 'max_token'; did you mean max_tokens?"),
        ({"n": 0}, 400, "n: send 1 or more, got 0."),
        ({"functions": []}, 400, "functions: is not supported any more; use tools."),
        ({"messages": []}, 400, "messages: empty input messages."),
        ({"messages": None}, 400, "messages: send a list, got null."),
        ({"max_output_tokens": 5}, 400, "use max_completion_tokens."),
        ({"max_tokens": 10**6}, 400, "max_tokens: send a whole number from 1 to "),
        ({"max_completion_tokens": "5"}, 400, "max_completion_tokens: send a whole number from 1 to "),
        ({"frequency_penaltyy": 1}, 400, "did you mean frequency_penalty?"),
        ({"input": "x"}, 400, "input: is not a field of this API; use messages."),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "file", "file": {"file_data": "data:,x", "filename": "x"}}],
                    }
                ]
            },
            400,
            "messages.0.content.0: this model reads text only; send the file's text.",
        ),
        ({"temperature": 3}, 400, "temperature"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, 400, "'x'"),
        ({"tool_choice": "required"}, 400, "tool_choice needs tools."),
        ({"max_tokens": 100_000}, 400, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 60_000}]}, 400, "maximum context length"),
        ({"logit_bias": {"a": 1}}, 400, "logit_bias: keys are token ids, got 'a'."),
        ({"structured_outputs": {}}, 400, "exactly one of"),
        ({"stop": [""]}, 400, "stop[0]"),
        ({"min_tokens": 9, "max_tokens": 3}, 400, "min_tokens must be in [0, 3]"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 400, "not both"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, 400, "only thinking"),
        ({"stream": True, "stream_options": [None]}, 400, "stream_options: send an object."),
    ],
)
async def test_a_mistake_gets_one_sentence(
    gateway: Gateway, change: dict[str, Any], status: int, says: str
) -> None:
    answer = await gateway.http.post("/v1/chat/completions", json={"model": MODEL, "messages": HI} | change)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert says in error["message"] and "Traceback" not in error["message"]
    assert gateway.script.requests == []


async def test_an_image_is_refused_with_its_place(gateway: Gateway) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, image]}]
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]: this model reads text only"):
        await gateway.openai.chat.completions.create(model=MODEL, messages=messages)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b"[" * 100_000, b'{"model": 1e999}', b"\xff\xfe"]
)
async def test_a_body_that_is_no_json_object(gateway: Gateway, body: bytes) -> None:
    answer = await gateway.http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


async def test_an_engine_error_before_the_first_token_has_a_status() -> None:
    async with running() as gateway:
        gateway.engine.faults.stall_s = 60.0

        async def crash() -> None:
            while not gateway.engine.load().active_requests:
                await asyncio.sleep(0.001)
            gateway.engine.crash()

        crashing = asyncio.create_task(crash())
        with pytest.raises(openai.InternalServerError) as caught:
            await stream(gateway)
        await crashing
        assert caught.value.status_code == 500
        with pytest.raises(openai.InternalServerError) as caught:  # and what comes later is refused
            await stream(gateway)
        assert caught.value.status_code == 503


async def test_an_engine_error_later_is_an_event_and_there_is_no_done() -> None:
    async with running() as gateway:
        gateway.engine.faults.fail_requests |= {1: 4, 2: 4}
        body = {"model": MODEL, "messages": HI, "stream": True}
        answer = await gateway.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        last = events(answer.text)[-1][1]
        assert last["error"]["code"] == "engine_error" and "[DONE]" not in answer.text
        with pytest.raises(openai.APIError):
            await stream(gateway)


async def test_json_validates_against_the_clients_models(gateway: Gateway) -> None:
    gateway.script.texts = ["r</think>ok" + call("get_weather", city="Paris")]
    body = {"model": MODEL, "messages": HI, "tools": [WEATHER], "logprobs": True, "top_logprobs": 1}
    answer: httpx.Response = await gateway.http.post("/v1/chat/completions", json=body)
    ChatCompletion.model_validate(answer.json())


ROUTERS = {  # as seen on the wire behind vllm-router 0.1.17
    "logprobs": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    "include_reasoning": True,
}


async def test_a_request_through_vllms_router_is_served(gateway: Gateway) -> None:
    body = {"model": MODEL, "messages": HI, "max_tokens": 3} | ROUTERS
    answer = await gateway.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("name", sorted(ROUTERS.keys() - {"logprobs", "ignore_eos"}))
async def test_other_values_of_the_routers_fields_are_refused(gateway: Gateway, name: str) -> None:
    for value in (not ROUTERS[name], "x", 1):
        body = {"model": MODEL, "messages": HI, name: value}
        answer = await gateway.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(f"{name}: only ")
