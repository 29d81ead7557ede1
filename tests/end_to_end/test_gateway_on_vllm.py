"""`make serve`'s stack in one piece: the official clients, the gateway, vLLM's engine and the tiny V4.1.

The weights are random: what can be asserted is form, determinism (in float32, where the model is
batch-invariant), constraints and accounts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import BadRequestError, OpenAI

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed."),
]

PROGRAM = str(Path(sys.executable).with_name("vllm-deepinfer"))
MODEL = "tiny"
HI: Any = [{"role": "user", "content": "Say something as json."}]
PLAIN: Any = {"thinking": {"type": "disabled"}}
ENDS_REASONING: Any = {"7": 40.0}  # the end-of-reasoning token, which random weights would not find
SCHEMA: Any = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"$ref": "#/$defs/digit"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
}
TOOL: Any = {"type": "function", "function": {"name": "paint", "strict": True, "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway on one vLLM engine."""
    folder = tmp_path_factory.mktemp("tiny")
    subprocess.run([PROGRAM, "tiny-checkpoint", str(folder)], check=True, capture_output=True)
    command = [PROGRAM, "gateway", "--model", str(folder), "--served-model-name", MODEL, "--port", "0"]
    command += ["--engine-args", "--enforce-eager --max-model-len 2048 --max-num-seqs 8 --dtype float32"]
    log = (folder / "log").open("w")
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    try:
        found, started = None, time.monotonic()
        while found is None and process.poll() is None and time.monotonic() - started < 300:
            assert process.stdout is not None
            found = re.search(r"Serving .* on (http://[\d.:]+)", process.stdout.readline())
        assert found, (folder / "log").read_text()[-3000:]
        yield found[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def openai(url: str) -> OpenAI:
    return OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=400
    )  # the first logprobs compile a kernel


@pytest.fixture(scope="module")
def anthropic(url: str) -> Anthropic:
    return Anthropic(base_url=url, api_key="none", max_retries=0, timeout=400)


def greedy(openai: OpenAI, **change: Any) -> Any:
    ask = {"model": MODEL, "messages": HI, "max_tokens": 24, "temperature": 0} | change
    return openai.chat.completions.create(**ask)


def test_a_stream_is_the_same_answer_as_the_document(openai: OpenAI) -> None:
    whole = greedy(openai, logprobs=True, top_logprobs=2)
    chunks = list(greedy(openai, stream=True, stream_options={"include_usage": True}))
    text = "".join(
        getattr(choice.delta, "reasoning_content", None) or "" for chunk in chunks for choice in chunk.choices
    )
    # Bytes at the end that are no character: U+FFFD from our detokeniser, nothing from the recipe's, which
    # answers with logprobs go through.
    assert text.rstrip("\ufffd") == whole.choices[0].message.reasoning_content.rstrip("\ufffd")
    assert len(text) > 10
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    # greedy: what was taken is the most likely token at every position
    entries = whole.choices[0].logprobs.to_dict()["reasoning_content"]
    assert all(entry["token"] == entry["top_logprobs"][0]["token"] for entry in entries)


def test_the_prefix_cache_is_reported_and_changes_nothing(openai: OpenAI) -> None:
    messages = [{"role": "user", "content": "A long enough question. " * 40}]
    first, second = greedy(openai, messages=messages), greedy(openai, messages=messages)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens > 100
    assert first.choices[0].message == second.choices[0].message


def test_choices_with_a_seed_repeat_and_differ(openai: OpenAI) -> None:
    def texts() -> list[str]:
        answer = greedy(openai, temperature=1, n=3, seed=11, extra_body=PLAIN)
        return [choice.message.content for choice in answer.choices]

    assert texts() == texts() and len(set(texts())) == 3


@pytest.mark.parametrize("thinks", [True, False])
def test_a_schema_holds(openai: OpenAI, thinks: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    extra = {"logit_bias": ENDS_REASONING} if thinks else {"extra_body": PLAIN}
    answer = greedy(openai, response_format=form, max_tokens=400, temperature=1, seed=5, **extra)
    assert answer.choices[0].finish_reason == "stop"
    document = json.loads(answer.choices[0].message.content)
    assert document["a"] in ("x", "y") and 0 <= document["b"] <= 9 and len(document) == 2


@pytest.mark.parametrize("thinks", [True, False])
def test_a_required_strict_call_is_made(openai: OpenAI, thinks: bool) -> None:
    extra = {"logit_bias": ENDS_REASONING} if thinks else {"extra_body": PLAIN}
    answer = greedy(
        openai, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=400, **extra
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "paint" and arguments["a"] in ("x", "y") and 0 <= arguments["b"] <= 9


@pytest.mark.parametrize(
    ("constraint", "accepts"),
    [
        ({"regex": "[ab]{3}c"}, r"[ab]{3}c"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"choice": ["red"]}, "red"),
    ],
)
def test_other_constraints(openai: OpenAI, constraint: dict[str, Any], accepts: str) -> None:
    answer = greedy(openai, extra_body=PLAIN | {"structured_outputs": constraint})
    assert re.fullmatch(accepts, answer.choices[0].message.content)


def test_a_grammar_that_is_none_is_the_clients_mistake(openai: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="grammar"):
        greedy(openai, extra_body=PLAIN | {"structured_outputs": {"grammar": "root ::= ("}})


def test_messages(anthropic: Anthropic) -> None:
    ask: Any = {"model": MODEL, "messages": HI}
    message = anthropic.messages.create(max_tokens=16, **ask)
    assert message.stop_reason == "max_tokens" and message.content[0].type == "thinking"
    count = anthropic.messages.count_tokens(**ask).input_tokens
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count and usage.output_tokens == 16
    with anthropic.messages.stream(max_tokens=16, **ask) as stream:
        assert stream.get_final_message().usage.output_tokens == 16


def test_turns_through_previous_response_id(openai: OpenAI) -> None:
    ask: Any = {"model": MODEL, "max_output_tokens": 16, "reasoning": {"effort": "none"}}
    first = openai.responses.create(input="One.", **ask)
    second = openai.responses.create(input="Two.", previous_response_id=first.id, **ask)
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + 16
    assert openai.responses.retrieve(second.id).previous_response_id == first.id


def test_a_client_that_leaves_frees_the_engine(url: str) -> None:
    body = {"model": MODEL, "messages": HI, "stream": True, "ignore_eos": True, "max_tokens": 1500}
    with httpx.Client(base_url=url, timeout=60) as client:
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            # The iterator is kept: httpx closes the connection when it is collected.
            lines = answer.iter_lines()
            next(lines)
            assert _wait_for_requests(client, 1)
        assert _wait_for_requests(client, 0), "the engine still works"


def _wait_for_requests(client: httpx.Client, count: int, seconds: float = 10) -> bool:
    """Whether the engine comes to hold that many requests in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        load = client.get("/status.json").json()["load"]
        if load["running_requests"] + load["waiting_requests"] == count:
            return True
        time.sleep(0.02)
    return False
