"""A direct way from an event to the client's socket, beside ASGI's `send`.

ASGI's way costs 12.5 µs per event: a message, a coroutine, uvicorn's checks, asyncio's write queue, one
system call. This costs 6.5 µs, most of it the system call (256 streams, one core of a two-core VM,
2026-11-29). A burst of frames in a row costs less than the same frames one by one: the kernel's part stays in
the cache, and whoever reads them is woken once and not once per frame.

`LaneProtocol` is uvicorn's httptools protocol; it puts a `Lane` into the scope. Without it, over TLS, or for
a client of HTTP/1.0, everything goes through `send` as ever.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable, Iterable
from typing import Any, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from vllm_deepinfer.gateway.steps import eager_task

SCOPE_KEY = "deepinfer.lane"
EAGER_PATHS = frozenset({"/v1/chat/completions", "/v1/messages", "/v1/responses"})
MOST_HEAD_BYTES = 64 << 10  # of a request line and headers, give or take one read; the parser has no limit
HEAD_S = 30.0  # for a request line and headers, from their first byte or the connection's beginning
LOOK_S = 0.05  # between two looks at a connection that is not read
_ENDED = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)  # the last one is Linux's
CHUNK_HEADS = [b"%x\r\n" % size for size in range(4096)]


def _nothing() -> None:
    """Nobody watches."""


def chunk_head(size: int) -> bytes:
    """What chunked transfer coding puts before a body of `size` bytes."""
    return CHUNK_HEADS[size] if size < len(CHUNK_HEADS) else b"%x\r\n" % size


def write_burst(burst: Iterable[tuple[Lane, bytes]]) -> None:
    """Write frames, in order, each whole and with its chunk head, to lanes that were `quick` when made."""
    write = os.write
    for lane, frame in burst:
        if lane.quick:  # an earlier frame of the burst may have filled its socket
            try:
                written = write(lane.fd, frame)
            except OSError:  # full, or reset by the client: let the transport notice and tell everybody
                written = 0
            if written == len(frame):
                continue
            lane.queue(frame[written:])
        else:
            lane.queue(frame)


class Lane:
    """Writes body chunks of one response whose head went out through ASGI, in chunked transfer coding.

    Attributes:
        fd: the socket's descriptor.
        quick: a frame may go straight to `fd`, see `write_burst`: nothing is queued in the transport, and the
            connection is watched and alive. A transport tells its protocol of the end before it closes the
            descriptor, so it is never another connection's.
    """

    __slots__ = ("_clear", "_flow", "_on_lost", "_transport", "_watched", "fd", "quick")

    def __init__(self, transport: Any, flow: FlowControl, fd: int, watched: set[Lane] | None = None) -> None:
        """`watched`: the connection's lanes that want to hear of its end."""
        self._transport = transport
        self._flow = flow
        self._watched = set() if watched is None else watched
        self._on_lost: Callable[[], None] = _nothing
        self._clear = False  # nothing is queued in the transport, and nobody but this lane will queue more
        self.fd = fd
        self.quick = False

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
        else:
            self._flow.resume_reading()  # paused behind a large body, nobody would see the end

    def unwatch(self) -> None:
        """Watch no more. Idempotent."""
        self._on_lost = _nothing
        self._watched.discard(self)
        self.quick = False

    def lost(self) -> None:
        """The connection has ended."""
        self.quick = False
        self._on_lost()

    def abort(self) -> None:
        """Close the connection now, unread bytes and all: a client that never reads would hold it open."""
        self.quick = False
        self._transport.abort()

    def queue(self, data: bytes) -> None:
        """Leave bytes of this body to the transport."""
        self._clear = self.quick = False
        if not self._transport.is_closing():
            self._transport.write(data)

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
        self.quick = self._on_lost is not _nothing
        frame = b"%x\r\n%b\r\n" % (len(body), body)
        try:
            written = os.write(self.fd, frame)
        except OSError:  # full, or reset by the client: let the transport notice and tell everybody
            written = 0
        if written < len(frame):
            self.queue(frame[written:])
        return True


class LaneProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a lane for every plain-text request. Pass as `http=` to uvicorn.Config.

    A request that has arrived whole on one of `EAGER_PATHS` begins at once and not in the event loop's next
    turn, where it would wait for all that this turn still has to do.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watched: set[Lane] = set()
        self._feeding = False
        self._looking: asyncio.TimerHandle | None = None
        self._head_ends: asyncio.TimerHandle | None = None
        self._in_head = False
        self._head_bytes = 0
        self._arrived: tuple[RequestResponseCycle, Any] | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._head_has_ended()
        if self._looking is not None:
            self._looking.cancel()
        for lane in tuple(self._watched):
            lane.lost()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        if self._head_ends is None:
            self._await_head()
        transport = self.transport
        connection = transport.get_extra_info("socket")
        if connection is not None and transport.get_extra_info("sslcontext") is None:
            lane = Lane(transport, self.flow, connection.fileno(), self._watched)
            cast(dict[str, Any], self.scope)[SCOPE_KEY] = lane

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_has_ended()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        self._feeding = True
        try:
            super().data_received(data)
        finally:
            self._feeding = False
            arrived, self._arrived = self._arrived, None
            if arrived is not None:
                self._begin(*arrived)
        if self._in_head and self._head_bytes > MOST_HEAD_BYTES:
            self._refuse_head()
        elif self._watched and self.flow.read_paused and self._looking is None:
            self._look()

    def _await_head(self) -> None:
        self._head_ends = self.loop.call_later(HEAD_S, self._head_is_late)

    def _head_is_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # an answer is under way before it
            self._await_head()
        else:
            self._refuse_head(b"408 Request Timeout")

    def _head_has_ended(self) -> None:
        if self._head_ends is not None:
            self._head_ends.cancel()
            self._head_ends = None

    def _refuse_head(self, status: bytes = b"431 Request Header Fields Too Large") -> None:
        """A head without end would be kept whole, and for ever."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:  # else it would be part of another answer
            self.transport.write(
                b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )
        self.transport.close()

    def _look(self) -> None:
        """Look for the end of a watched connection, again and again while it is not read.

        uvicorn reads no more behind a request that came before the answer to the one before it, and asyncio
        does not see the end of what it does not read.
        """
        self._looking = None
        if not (self._watched and self.flow.read_paused) or self.transport.is_closing():
            return
        look = select.poll()
        look.register(next(iter(self._watched)).fd, _ENDED)
        if look.poll(0):
            self.transport.abort()
        else:
            self._looking = self.loop.call_later(LOOK_S, self._look)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._feeding and self._arrived is None:  # its body may be in the same data
            self._arrived = (cycle, app)
        else:
            super()._start_asgi_task(cycle, app)

    def _begin(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.more_body or cycle.scope["path"] not in EAGER_PATHS:
            super()._start_asgi_task(cycle, app)
            return
        task = eager_task(self.loop, cycle.run_asgi(app))
        if task is not None:
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
