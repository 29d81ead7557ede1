"""What clients are told while the engines start, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx
import pytest

from vllm_deepinfer.gateway.serve import listen
from vllm_deepinfer.gateway.starting import answers_503


@pytest.fixture
def listener() -> Any:
    with listen("127.0.0.1", 0) as made:
        yield made


def url(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/chat/completions?x=1", "/v1/messages"])
async def test_every_path_is_503_with_its_api_s_error(listener: socket.socket, path: str) -> None:
    async with answers_503(listener, 0), httpx.AsyncClient(base_url=url(listener)) as client:
        answer = await client.post(path, json={"text": "x" * 3_000_000})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    error = answer.json()["error"]
    assert error["type"] == "overloaded_error" and error["message"].startswith("the engines are starting")
    assert ("code" in error) is (path != "/v1/messages")


async def test_a_short_start_refuses_nobody(listener: socket.socket) -> None:
    async with answers_503(listener, 30):
        reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        writer.write(b"GET /health HTTP/1.1\r\n\r\n")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.2)

    async def hello(asked: asyncio.StreamReader, theirs: asyncio.StreamWriter) -> None:
        await asked.readuntil(b"\r\n\r\n")
        theirs.write(b"served")
        theirs.close()

    async with await asyncio.start_server(hello, sock=listener.dup()):
        assert await asyncio.wait_for(reader.read(), 5) == b"served"
    writer.close()


async def test_the_listener_outlives_it(listener: socket.socket) -> None:
    """Whoever connects between the two servers is answered by the second."""
    async with answers_503(listener, 0):
        await asyncio.sleep(0.05)
    reader_writer = asyncio.open_connection(*listener.getsockname()[:2])
    reader, writer = await asyncio.wait_for(reader_writer, 5)

    async def hello(_: asyncio.StreamReader, theirs: asyncio.StreamWriter) -> None:
        theirs.write(b"second")
        theirs.close()

    async with await asyncio.start_server(hello, sock=listener.dup()):
        assert await asyncio.wait_for(reader.read(), 5) == b"second"
    writer.close()


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\n", b"\r\n\r\n", b"x" * 200_000, b"a b c d\r\n\r\n"]
)
async def test_bytes_that_are_no_request_hold_nobody_up(listener: socket.socket, sent: bytes) -> None:
    async with answers_503(listener, 0):
        _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        writer.write(sent)
        async with httpx.AsyncClient(base_url=url(listener)) as client:
            assert (await client.get("/health")).status_code == 503
        writer.close()
