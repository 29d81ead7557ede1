"""503 while the engines start: a port that is taken and silent would hold every client until its timeout."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

from vllm_deepinfer.gateway.errors import ApiError, error_body

RETRY_AFTER_S = 5.0
GRACE_S = 10.0
"""A gateway whose engines run already is there in a second or two: until then clients just wait for it."""
STARTING = ApiError(
    503,
    "the engines are starting; try again in a few seconds.",
    code="starting",
    retry_after_s=RETRY_AFTER_S,
)
_HEAD_BYTES = 64 << 10
_PATIENCE_S = 10.0  # for a client's head, and then for its body


@contextlib.asynccontextmanager
async def answers_503(listener: socket.socket, after_s: float = GRACE_S) -> AsyncIterator[None]:
    """Answer every request on `listener` with 503 until the block ends; the socket itself stays open.

    Who connects before `after_s`, or in the moment of the change, waits in the socket's queue for whoever
    accepts next.
    """
    refusing = asyncio.create_task(_refuse_all(listener, after_s), name="503 while engines start")
    try:
        yield
    finally:
        refusing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await refusing


async def _refuse_all(listener: socket.socket, after_s: float) -> None:
    await asyncio.sleep(after_s)
    # A socket of its own: the server closes the one that it is given.
    server = await asyncio.start_server(_refuse, sock=listener.dup(), limit=_HEAD_BYTES)
    try:
        await asyncio.Event().wait()
    finally:
        server.close()


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        async with asyncio.timeout(_PATIENCE_S):
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(_answer(_path(head)))
            await writer.drain()
            writer.write_eof()
            while await reader.read(_HEAD_BYTES):  # a body left unread would reset the answer away
                pass
    writer.close()


def _path(head: bytes) -> str:
    """Of the request line; "" for what is none."""
    parts = head.split(b"\r\n", 1)[0].split(b" ")
    return parts[1].split(b"?")[0].decode("latin-1") if len(parts) == 3 else ""


def _answer(path: str) -> bytes:
    body = json.dumps(error_body(path, STARTING, None)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        *STARTING.headers(),
    ]
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    return b"HTTP/1.1 503 Service Unavailable\r\n" + lines + b"\r\n" + body
