"""Listening, and an engine that does not start."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.harness import DATA
from vllm_deepinfer.engine import EngineDead
from vllm_deepinfer.engine.simulated import SimulatedEngine
from vllm_deepinfer.errors import UserError
from vllm_deepinfer.gateway import serve as module
from vllm_deepinfer.gateway.limits.keys import KeyRing
from vllm_deepinfer.gateway.serve import listen, serve
from vllm_deepinfer.gateway.settings import GatewaySettings


def test_any_free_port() -> None:
    with listen("127.0.0.1", 0) as first, listen("127.0.0.1", 0) as second:
        assert first.getsockname()[1] != second.getsockname()[1] != 0


def test_a_port_that_is_taken() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of 127.0.0.1 is taken"):
            listen("127.0.0.1", port)


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1 port"):
        listen("192.0.2.1", 0)


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6.")
def test_the_other_loopback() -> None:
    try:
        listener = listen("::1", 0)
    except UserError:
        pytest.skip("this machine has no ::1.")
    with listener:
        assert listener.family == socket.AF_INET6


async def run(monkeypatch: pytest.MonkeyPatch, engine: Any, ready: Any) -> None:
    monkeypatch.setattr(module, "make_engine", lambda name, model, arguments: engine)
    settings = GatewaySettings(served_names=("m",), drain_timeout_s=1)
    with listen("127.0.0.1", 0) as listener:
        await serve("any", Path(DATA), [], settings, KeyRing(), listener, ready)


class Watched(SimulatedEngine):
    """Says whether it has been closed."""

    closed = False

    async def close(self) -> None:
        self.closed = True
        await super().close()


async def test_an_engine_that_does_not_start_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Watched()
    engine.faults.fail_start = EngineDead("there is no memory for it.")
    with pytest.raises(UserError, match="there is no memory for it"):
        await run(monkeypatch, engine, lambda url: pytest.fail("it is not ready"))
    assert engine.closed


async def test_a_signal_while_the_engine_starts_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Watched):
        async def start(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)

    engine = Slow()
    with pytest.raises(asyncio.CancelledError):
        await run(monkeypatch, engine, lambda url: pytest.fail("it is not ready"))
    assert engine.closed


async def test_a_signal_while_it_serves_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Watched()
    urls: list[str] = []

    def ready(url: str) -> None:
        urls.append(url)
        asyncio.get_running_loop().call_later(0.3, os.kill, os.getpid(), signal.SIGINT)

    await run(monkeypatch, engine, ready)
    assert engine.closed and urls[0].startswith("http://127.0.0.1:")


async def test_an_engine_that_dies_ends_the_server_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the answer that it was at; whoever watches the process starts it again."""
    monkeypatch.setattr(module, "HEALTH_S", 0.01)
    engine = Watched()
    answers: list[httpx.Response] = []

    async def ask(url: str) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1000}
        async with httpx.AsyncClient(base_url=url) as client:
            asked = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            while not engine.load().active_requests:
                await asyncio.sleep(0.01)
            engine.crash("the card fell out.")
            answers.append(await asked)

    tasks = []
    with pytest.raises(EngineDead, match=r"the card fell out\."):
        await run(monkeypatch, engine, lambda url: tasks.append(asyncio.create_task(ask(url))))
    await asyncio.gather(*tasks)
    assert answers[0].status_code == 500 and "error" in answers[0].json()
    assert engine.closed
