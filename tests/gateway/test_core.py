"""Core: salts of tenants, places of keys, and a clean start and stop."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from tests.gateway.harness import MODEL, Script, make_app
from vllm_deepinfer.gateway.calls import Call
from vllm_deepinfer.gateway.dialects import chat
from vllm_deepinfer.gateway.errors import ApiError
from vllm_deepinfer.gateway.limits.keys import ApiKey
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
