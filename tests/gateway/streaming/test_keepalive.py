"""KeepAlive: comments in silent streams, none in busy, full or ended ones."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from vllm_deepinfer.gateway.dialects.base import StreamEncoder
from vllm_deepinfer.gateway.metrics import GatewayMetrics
from vllm_deepinfer.gateway.streaming.exchange import Account, StreamExchange
from vllm_deepinfer.gateway.streaming.keepalive import KeepAlive
from vllm_deepinfer.gateway.streaming.sse import SseWriter

COMMENT = b": keep-alive\n\n"


class Timers:
    """Stands for the loop's timers: runs what is due when told to."""

    def __init__(self, monkeypatch: Any) -> None:
        self.waiting: list[tuple[float, Any]] = []
        self.cancelled = 0
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", self._later, raising=False)

    def _later(self, delay: float, callback: Any) -> Any:
        self.waiting.append((delay, callback))
        return self

    def cancel(self) -> None:
        self.cancelled += 1

    def fire(self) -> None:
        (_, callback), self.waiting = self.waiting[0], self.waiting[1:]
        callback()


class Body:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.statuses: list[int] = []

    async def send(self, message: Any) -> None:
        if "status" in message:
            self.statuses.append(message["status"])
        else:
            self.parts.append(message["body"])


def make() -> tuple[StreamExchange, Body]:
    body = Body()
    encoder = cast(StreamEncoder, None)
    return StreamExchange(GatewayMetrics(), Account(received=0.0), 1, encoder, SseWriter(body.send), ()), body


async def test_a_silent_stream_gets_its_head_and_then_comments(monkeypatch: Any) -> None:
    exchange, body = make()
    timers = Timers(monkeypatch)
    KeepAlive(exchange, 15.0)
    assert [delay for delay, _ in timers.waiting] == [15.0] and not body.parts
    timers.fire()
    timers.fire()
    assert body.statuses == [200] and body.parts == [COMMENT, COMMENT]
    assert [delay for delay, _ in timers.waiting] == [15.0]


async def test_a_stream_that_wrote_since_the_last_look_gets_none(monkeypatch: Any) -> None:
    exchange, body = make()
    timers = Timers(monkeypatch)
    KeepAlive(exchange, 1.0)
    exchange.account.output_events += 1
    timers.fire()
    assert body.parts == []
    timers.fire()
    assert body.parts == [COMMENT]


async def test_tokens_that_went_past_the_account_count(monkeypatch: Any) -> None:
    exchange, body = make()
    timers = Timers(monkeypatch)

    class Past:
        """A choice that has written an event of which the account does not know yet."""

        def settle(self) -> int:
            exchange.account.output_events += 1
            return 0

    exchange.join(cast(Any, Past()))
    KeepAlive(exchange, 1.0)
    timers.fire()
    timers.fire()
    assert body.parts == []


async def test_it_ends_with_the_stream(monkeypatch: Any) -> None:
    exchange, body = make()
    timers = Timers(monkeypatch)
    beat = KeepAlive(exchange, 1.0)
    exchange.leave()
    timers.fire()
    assert body.parts == [] and timers.waiting == []
    beat.stop()
    beat.stop()
    assert timers.cancelled == 2
