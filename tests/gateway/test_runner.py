"""Runner: what reaches the engine, and what is left there when something goes wrong."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.harness import MODEL, Gateway, running
from vllm_deepinfer.engine import GenerateRequest, Overloaded
from vllm_deepinfer.gateway.errors import ApiError
from vllm_deepinfer.gateway.tokens import TokenizerBusyError

ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


async def post(gateway: Gateway, **change: Any) -> Any:
    return await gateway.http.post("/v1/chat/completions", json=ASK | change)


async def test_a_choice_that_is_refused_takes_the_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running("word " * 3000) as gateway:
        submit = gateway.engine.submit
        seen: list[str] = []

        async def third_is_one_too_many(request: GenerateRequest, sink: Any) -> None:
            seen.append(request.request_id)
            if len(seen) == 3:
                raise Overloaded("the engine is full.")
            await submit(request, sink)

        monkeypatch.setattr(gateway.engine, "submit", third_is_one_too_many)
        answer = await post(gateway, n=5)
        assert answer.status_code == 429 and len(seen) == 3
        await gateway.idle()
        assert len(gateway.app.core.hub) == 0 and gateway.engine.load().active_requests == 0


async def test_what_is_asked_for_is_what_is_submitted() -> None:
    async with running(min_priority=-3) as gateway:
        await post(gateway, priority=-3, cache_salt="s", max_tokens=7)
        request = gateway.script.requests[0]
        assert request.priority == -3 and request.cache_salt is not None and request.cache_salt != "s"
        assert request.sampling.max_tokens == 7 and request.request_id.endswith("-0")
        await post(gateway)
        assert gateway.script.requests[1].cache_salt is None
        # without a limit of its own: what is left of the context, at most the recipe's default
        prompt = len(gateway.script.requests[1].prompt_token_ids)
        assert gateway.script.requests[1].sampling.max_tokens == 8192 - prompt


async def test_a_prompt_over_the_gateways_limit() -> None:
    async with running(max_prompt_tokens=100) as gateway:
        assert (await post(gateway)).status_code == 200
        answer = await post(gateway, messages=[{"role": "user", "content": "x" * 500}])
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded" and "100 are allowed" in error["message"]


async def test_a_busy_tokeniser_is_429(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as gateway:

        async def busy(text: str, ranges: Any) -> list[int]:
            raise TokenizerBusyError("too much text waits for tokenisation; try again in a second.")

        monkeypatch.setattr(gateway.app.core.runner.prompts, "encode_prompt", busy)
        answer = await post(gateway)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        with pytest.raises(ApiError) as caught:
            prepared: Any = type("Prompt", (), {"prompt": "x", "special_ranges": []})
            await gateway.app.core.runner.encode(prepared)
        assert caught.value.code == "tokenizer_busy"


async def test_text_that_is_no_unicode_is_refused() -> None:
    async with running() as gateway:
        body = b'{"model": "tiny-v4.1", "messages": [{"role": "user", "content": "\\ud83d"}]}'
        answer = await gateway.http.post("/v1/chat/completions", content=body)
        assert answer.status_code == 400
