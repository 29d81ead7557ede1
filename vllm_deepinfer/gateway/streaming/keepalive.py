"""KeepAlive: a comment in a stream that has been silent for a while."""

from __future__ import annotations

import asyncio

from vllm_deepinfer.gateway.streaming.exchange import StreamExchange


class KeepAlive:
    """Looks at one stream every `interval_s` seconds; a timer, because a task per stream would cost more.

    A stream in which nothing was written since the last look gets a comment, so that nobody on the way takes
    a long prefill for a dead connection.
    """

    __slots__ = ("_exchange", "_interval_s", "_seen", "_timer")

    def __init__(self, exchange: StreamExchange, interval_s: float) -> None:
        self._exchange = exchange
        self._interval_s = interval_s
        self._seen = exchange.account.output_events
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._look)

    def stop(self) -> None:
        """Look no more. Idempotent."""
        self._timer.cancel()

    def _look(self) -> None:
        exchange = self._exchange
        if exchange.done.done():
            return
        exchange.settle()
        events = exchange.account.output_events
        if events == self._seen:
            exchange.keep_alive()
        self._seen = events
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._look)
