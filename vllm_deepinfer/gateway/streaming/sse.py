"""Server-sent events over raw ASGI, written from the engine's step callback without suspending it.

An ASGI `send` is a coroutine, but uvicorn's only suspends while the client's socket is full. So the writer
drives
its first step by hand: it ends at once in the usual case and costs no task switch; if it suspends, a task of
this one stream finishes it, and what follows is queued behind it. One slow reader never holds up the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, MutableMapping
from typing import Any

from vllm_deepinfer.gateway.steps import Rest
from vllm_deepinfer.gateway.streaming.lane import Lane

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
Headers = Iterable[tuple[bytes, bytes]]


def data_frame(text: str) -> bytes:
    """An unnamed event whose data is one line of JSON."""
    return f"data: {text}\n\n".encode()


def event_frame(name: str, text: str) -> bytes:
    """A named event whose data is one line of JSON."""
    return f"event: {name}\ndata: {text}\n\n".encode()


class SlowReader(Exception):
    """The client left more unread bytes than the gateway keeps for it."""


class SseWriter:
    """Writes one response body in order; `write` never blocks.

    Args:
        send: the ASGI send of this request.
        lane: a cheaper way for bodies, where the server has one.
        max_pending: bytes kept for a client that does not read; beyond it `write` raises SlowReader.
    """

    __slots__ = (
        "_backlog",
        "_drain",
        "_ended",
        "_max_pending",
        "_pending",
        "_send",
        "broken",
        "lane",
        "started",
    )

    def __init__(self, send: Send, max_pending: int = 4 << 20, lane: Lane | None = None) -> None:
        self._send = send
        self.lane = lane
        self._max_pending = max_pending
        self._backlog: deque[bytes] = deque()
        self._pending = 0
        self._drain: asyncio.Task[None] | None = None
        self._ended = False
        self.started = False
        self.broken = False

    @property
    def pending(self) -> int:
        """Bytes waiting behind a full socket."""
        return self._pending

    def start(self, status: int, headers: Headers) -> None:
        """Send the response head."""
        self.started = True
        self._push({"type": "http.response.start", "status": status, "headers": list(headers)})

    def write(self, body: bytes) -> None:
        """Send or queue `body`. Raises: SlowReader when the queue is full."""
        if not body:
            return
        if self._drain is None:
            lane = self.lane
            if lane is not None and not self.broken and lane.write(body):
                return
            self._push({"type": "http.response.body", "body": body, "more_body": True})
            return
        self._pending += len(body)
        if self._pending > self._max_pending:
            raise SlowReader(f"{self._pending} bytes are unread")
        self._backlog.append(body)

    async def close(self) -> None:
        """End the body once everything queued has been sent; nothing after `discard` or a lost connection."""
        if self._drain is not None and not self.broken:
            await self._drain
        if self.started and not self._ended and not self.broken:
            self._ended = True
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def discard(self) -> None:
        """Give up on the client: drop what is queued, and the connection."""
        self.broken = True
        self._backlog.clear()
        self._pending = 0
        if self._drain is not None:
            self._drain.cancel()
        if self.lane is not None:
            self.lane.abort()

    def _push(self, message: Message) -> None:
        if self.broken:
            return
        if self._drain is not None:  # only the head can meet this: bodies are queued by `write`
            raise RuntimeError("the response head must be the first message")
        steps = self._send(message).__await__()
        try:
            waits_for = next(steps)
        except StopIteration:
            return
        except OSError:
            self.broken = True
            return
        self._drain = asyncio.get_running_loop().create_task(self._finish(steps, waits_for))

    async def _finish(self, steps: Generator[Any, Any, None], waits_for: Any) -> None:
        try:
            await Rest(steps, waits_for)
            while self._backlog:
                body = b"".join(self._backlog)
                self._backlog.clear()
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
                self._pending -= len(body)
        except OSError:
            self.broken = True
        finally:
            self._drain = None
