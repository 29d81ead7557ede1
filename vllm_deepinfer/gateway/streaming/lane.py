"""A direct way from an event to the client's socket, beside ASGI's `send`.

ASGI's way costs 12.5 µs per event: a message, a coroutine, uvicorn's checks, asyncio's write queue, one
system call. This costs 6.5 µs, most of it the system call (256 streams, one core of a two-core VM,
2026-11-29).

`LaneProtocol` is uvicorn's httptools protocol; it puts a `Lane` into the scope. Without it, over TLS, or for
a client of HTTP/1.0, everything goes through `send` as ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

SCOPE_KEY = "deepinfer.lane"


def _nothing() -> None:
    """Nobody watches."""


class Lane:
    """Writes body chunks of one response whose head went out through ASGI, in chunked transfer coding."""

    __slots__ = ("_clear", "_fd", "_flow", "_on_lost", "_transport", "_watched")

    def __init__(self, transport: Any, flow: FlowControl, fd: int, watched: set[Lane] | None = None) -> None:
        """`watched`: the connection's lanes that want to hear of its end."""
        self._transport = transport
        self._flow = flow
        self._fd = fd
        self._watched = set() if watched is None else watched
        self._on_lost: Callable[[], None] = _nothing
        self._clear = False  # nothing is queued in the transport, and nobody but this lane will queue more

    @classmethod
    def open(cls, scope: Any) -> Lane | None:
        """The lane of a request, or None where events must go through `send`."""
        found = scope.get(SCOPE_KEY)
        return found if scope.get("http_version") == "1.1" else None

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call `on_lost` when the connection ends, at once if it has."""
        self._on_lost = on_lost
        self._watched.add(self)
        if self._transport.is_closing():
            on_lost()

    def unwatch(self) -> None:
        """Watch no more. Idempotent."""
        self._on_lost = _nothing
        self._watched.discard(self)

    def lost(self) -> None:
        """The connection has ended."""
        self._on_lost()

    def abort(self) -> None:
        """Close the connection now, unread bytes and all: a client that never reads would hold it open."""
        self._transport.abort()

    def write(self, body: bytes) -> bool:
        """Write one chunk. False: the client reads too slowly, so use `send`, which waits."""
        transport = self._transport
        if transport.is_closing():  # from here on the descriptor may belong to somebody else
            return True
        if not self._clear:
            if transport.get_write_buffer_size():  # what is queued goes first
                if self._flow.write_paused:
                    return False
                transport.write(b"%x\r\n%b\r\n" % (len(body), body))
                return True
            self._clear = True
        frame = b"%x\r\n%b\r\n" % (len(body), body)
        try:
            written = os.write(self._fd, frame)
        except BlockingIOError:
            written = 0
        except OSError:  # reset by the client: let the transport notice and tell everybody
            written = 0
        if written < len(frame):
            self._clear = False
            transport.write(frame[written:])
        return True


class LaneProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a lane for every plain-text request. Pass as `http=` to uvicorn.Config."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watched: set[Lane] = set()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for lane in tuple(self._watched):
            lane.lost()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        transport = self.transport
        connection = transport.get_extra_info("socket")
        if connection is not None and transport.get_extra_info("sslcontext") is None:
            lane = Lane(transport, self.flow, connection.fileno(), self._watched)
            cast(dict[str, Any], self.scope)[SCOPE_KEY] = lane
