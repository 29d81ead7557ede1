"""Golden transcripts: the bytes on the wire, for each API, of an answer with reasoning, text and a tool call.

Ids and times are masked. `python -m tests.gateway.test_golden` writes them anew; read the difference before
you commit it.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.harness import MODEL, call, running

GOLDEN = Path(__file__).parent / "data" / "golden"
ANSWER = "Let me see.</think>I'll look 😀" + call("get_weather", city="Paris 2>&1", days=3)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTION = {"name": "get_weather", "parameters": PARAMETERS}
USER = [{"role": "user", "content": "Weather?"}]

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {
            "messages": USER,
            "tools": [{"type": "function", "function": FUNCTION}],
            "stream_options": {"include_usage": True},
        },
    ),
    "chat-stop-logprobs": (
        "/v1/chat/completions",
        {
            "messages": USER,
            "thinking": {"type": "disabled"},
            "stop": ["look"],
            "logprobs": True,
            "top_logprobs": 1,
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": USER,
            "max_tokens": 500,
            "tools": [{"name": "get_weather", "input_schema": PARAMETERS}],
        },
    ),
    "responses": (
        "/v1/responses",
        {"input": "Weather?", "tools": [{"type": "function"} | FUNCTION], "metadata": {"k": "v"}},
    ),
}


def masked(text: str) -> str:
    """Without what differs from run to run."""
    text = re.sub(r"(chatcmpl-|resp_|msg_)[0-9a-f]{32}", r"\1ID", text)
    text = re.sub(r"call_(\d\d)_\w{24}", r"call_\1_ID", text)
    return re.sub(r'"(created|created_at|completed_at)":\d+', r'"\1":0', text)


async def transcript(name: str) -> str:
    path, body = REQUESTS[name]
    async with running(ANSWER, tokens_per_step=4) as gateway:
        answer = await gateway.http.post(path, json={"model": MODEL, "stream": True} | body)
        assert answer.status_code == 200, answer.text
        return masked(answer.text)


@pytest.mark.parametrize("name", REQUESTS)
async def test_the_wire_is_as_it_was(name: str) -> None:
    assert await transcript(name) == (GOLDEN / f"{name}.sse").read_text(encoding="utf-8")


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for each in REQUESTS:
        (GOLDEN / f"{each}.sse").write_text(asyncio.run(transcript(each)), encoding="utf-8")
