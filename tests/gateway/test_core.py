"""Core: salts of tenants, places of keys, and a clean start and stop."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from tests.gateway.harness import MODEL, Script, make_app, running
from vllm_deepinfer.gateway.calls import Call
from vllm_deepinfer.gateway.dialects import chat
from vllm_deepinfer.gateway.errors import ApiError
from vllm_deepinfer.gateway.limits.keys import ApiKey, KeyRing, digest
from vllm_deepinfer.gateway.streaming.exchange import Account


def call_of(name: str | None, **limits: int) -> Call:
    key = None if name is None else ApiKey(name=name, sha256="a" * 64, **limits)  # type: ignore[arg-type]
    return Call(request_id="r", route="/x", account=Account(received=time.monotonic()), key=key)


def test_salts_keep_tenants_apart() -> None:
    app, _ = make_app(Script())
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    plain = chat.prepare(body, app.core.card, "id")

    def salt(tenant: str | None, own: str | None) -> str | None:
        return app.core.cache_salt(replace(plain, cache_salt=own), call_of(tenant))

    assert salt(None, None) is None  # nobody to keep apart: everything is shared
    assert salt("a", None) == salt("a", None) is not None
    salts = [salt(None, "s"), salt("a", None), salt("b", None), salt("a", "s"), salt("b", "s")]
    # nor can a tenant's own salt reach another's entries, whatever is joined to what
    salts += [salt("a", "1:b:s"), salt("a.1", "s"), salt("a", ".1s"), salt(None, "1:a:")]
    assert len(set(salts)) == len(salts)
    app.core.runner.prompts.close()


def test_a_place_is_given_back_with_what_was_generated() -> None:
    app, _ = make_app(Script())
    call = call_of("a", max_concurrent=1, tokens_per_minute=100)
    with app.core.hold_rate(call):
        with pytest.raises(ApiError, match="at once"), app.core.hold_rate(call):
            pass
        call.account.output_tokens = 101
    with pytest.raises(ApiError, match="100 tokens per minute"), app.core.hold_rate(call):
        pass
    app.core.runner.prompts.close()


async def test_start_and_stop_leave_nothing_behind() -> None:
    app, _ = make_app(Script())
    await app.core.start()
    tasks = list(app.core._tasks)
    assert len(tasks) == 2 and not any(task.done() for task in tasks)
    await app.core.stop()
    assert all(task.done() for task in tasks)
    with pytest.raises(RuntimeError, match="not open"):
        app.core.responses._open_db  # noqa: B018


PLAIN, FAST = "sk-deepinfer-plain", "sk-deepinfer-fast"
PRIORITY_KEYS = KeyRing(
    [
        ApiKey(name="plain", sha256=digest(PLAIN)),
        ApiKey(name="fast", sha256=digest(FAST), min_priority=-10),
        ApiKey(name="slow", sha256=digest("slow"), min_priority=5),
    ]
)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize(
    ("key", "priority", "lowest"),
    [
        (PLAIN, 0, None),
        (PLAIN, 7, None),
        (PLAIN, -1, 0),
        (FAST, -10, None),
        (FAST, -11, -10),
        ("slow", 5, None),
        ("slow", 4, 5),
    ],
)
async def test_nobody_overtakes_others_unless_allowed(
    path: str, key: str, priority: int, lowest: int | None
) -> None:
    ask = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    if path == "/v1/responses":
        ask = {"model": MODEL, "input": "hi"}
    async with running(keys=PRIORITY_KEYS) as gateway:
        headers = {"x-api-key": key}
        answer = await gateway.http.post(path, json=ask | {"priority": priority}, headers=headers)
        if lowest is None:
            assert answer.status_code == 200 and gateway.script.requests[0].priority == priority
            return
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and f"at least {lowest} is allowed" in message
        assert f"got {priority}" in message and not gateway.script.requests


async def test_without_keys_the_server_sets_the_bound() -> None:
    ask = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    for bound, status in ((0, 400), (-2, 200)):
        async with running(min_priority=bound) as gateway:
            answer = await gateway.http.post("/v1/chat/completions", json=ask | {"priority": -2})
            assert answer.status_code == status
