"""SseWriter against sends that complete, suspend, fail and never come back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from vllm_deepinfer.gateway.streaming.sse import SlowReader, SseWriter, data_frame, event_frame


class Socket:
    """An ASGI send that records; while `full`, it suspends before it writes, as uvicorn's does."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.writable = asyncio.Event()
        self.writable.set()
        self.gone = False

    async def send(self, message: Any) -> None:
        if not self.writable.is_set():
            await self.writable.wait()
        if self.gone:
            raise OSError("connection lost")
        self.messages.append(dict(message))

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.messages)


def test_frames() -> None:
    assert data_frame('{"a":"é"}') == 'data: {"a":"é"}\n\n'.encode()
    assert event_frame("ping", "{}") == b"event: ping\ndata: {}\n\n"


async def test_a_write_is_out_before_it_returns() -> None:
    socket = Socket()
    writer = SseWriter(socket.send)
    writer.start(200, [(b"x", b"y")])
    writer.write(b"one")
    assert [m["type"] for m in socket.messages] == ["http.response.start", "http.response.body"]
    assert socket.messages[0]["status"] == 200 and socket.messages[0]["headers"] == [(b"x", b"y")]
    await writer.close()
    assert socket.messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


async def test_nothing_is_sent_for_nothing() -> None:
    socket = Socket()
    writer = SseWriter(socket.send)
    writer.start(200, [])
    writer.write(b"")
    assert len(socket.messages) == 1


async def test_a_full_socket_queues_in_order_and_blocks_nobody() -> None:
    socket = Socket()
    writer = SseWriter(socket.send)
    writer.start(200, [])
    socket.writable.clear()
    for part in (b"one", b"two", b"three"):
        writer.write(part)
    assert socket.body == b"" and writer.pending == len(b"twothree")
    socket.writable.set()
    await asyncio.sleep(0.01)
    assert socket.body == b"onetwothree" and writer.pending == 0
    writer.write(b"four")  # straight again
    assert socket.body == b"onetwothreefour"
    await writer.close()
    assert socket.messages[-1]["more_body"] is False


async def test_close_waits_for_the_queue() -> None:
    socket = Socket()
    writer = SseWriter(socket.send)
    writer.start(200, [])
    socket.writable.clear()
    writer.write(b"one")
    writer.write(b"two")
    closing = asyncio.create_task(writer.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    socket.writable.set()
    await closing
    assert socket.body == b"onetwo" and socket.messages[-1]["more_body"] is False


async def test_writes_while_the_queue_drains_stay_in_order() -> None:
    socket = Socket()
    writer = SseWriter(socket.send)
    writer.start(200, [])
    expected = b""
    for i in range(200):
        (socket.writable.clear if i % 7 == 3 else socket.writable.set)()
        part = f"{i},".encode()
        writer.write(part)
        expected += part
        if i % 3 == 0:
            await asyncio.sleep(0)
    socket.writable.set()
    await writer.close()
    assert socket.body == expected


async def test_a_reader_that_is_too_slow() -> None:
    socket = Socket()
    writer = SseWriter(socket.send, max_pending=10)
    writer.start(200, [])
    socket.writable.clear()
    writer.write(b"in flight")
    writer.write(b"0123456789")
    with pytest.raises(SlowReader):
        writer.write(b"x")
    writer.discard()
    await asyncio.sleep(0)
    socket.writable.set()
    await writer.close()
    assert socket.body == b""


async def test_a_lost_connection_is_silent() -> None:
    socket = Socket()
    writer = SseWriter(socket.send)
    writer.start(200, [])
    socket.gone = True
    writer.write(b"x")
    writer.write(b"y")
    await writer.close()
    assert writer.broken and len(socket.messages) == 1


async def test_a_connection_lost_while_suspended_is_silent_too() -> None:
    socket = Socket()
    writer = SseWriter(socket.send)
    writer.start(200, [])
    socket.writable.clear()
    writer.write(b"x")
    writer.write(b"y")
    socket.gone = True
    socket.writable.set()
    await asyncio.sleep(0.01)
    assert writer.broken
    writer.write(b"z")
    await writer.close()
    assert socket.body == b""


async def test_a_send_that_suspends_several_times() -> None:
    seen = []

    async def send(message: Any) -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        seen.append(message.get("body"))

    writer = SseWriter(send)
    writer.write(b"one")
    writer.write(b"two")
    await asyncio.sleep(0.02)
    assert seen == [b"one", b"two"]
