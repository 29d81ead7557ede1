"""The load client: counts events and answers, notes first events, tells refusals from errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from vllm_deepinfer.bench.gateway import load as module
from vllm_deepinfer.bench.gateway.load import Load, request

EVENTS = [b'data: {"id":"x-%d","n":1}\n\n', b'data: {"id":"x-%d","n":2}\n\n', b"data: [DONE]\n\n"]


def answer(number: int) -> bytes:
    chunks = [event % number if b"%d" in event else event for event in EVENTS]
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body


@asynccontextmanager
async def serving(answers: list[bytes], piece: int = 1 << 20) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Gives the answers in turn, the last one again and again, in pieces."""
    seen: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                return
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            seen.append(await reader.readexactly(length))
            whole = answers[min(len(seen), len(answers)) - 1]
            if not whole:
                writer.close()
                return
            for start in range(0, len(whole), piece):
                writer.write(whole[start : start + piece])
                await writer.drain()
                await asyncio.sleep(0)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], seen
    finally:
        server.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("piece", [1, 3, 50, 1 << 20])
async def test_answers_are_counted_however_they_are_cut(piece: int) -> None:
    async with serving([answer(i) for i in range(3)], piece) as (port, seen):
        load = Load(port, 5, answers=3)
        await load.open(1, 0.0)
        await until(lambda: load.answers == 3)
        assert len(seen) == 3
        assert json.loads(load.sample()) == {"events": 6, "answers": 3, "refused": 0, "errors": 0}
        first = json.loads(load.take_first())
        assert [name for name, _, _ in first] == ["x-0", "x-1", "x-2"]
        assert all(sent < got for _, sent, got in first)
        assert load.take_first() == "[]"


async def test_streams_are_asked_for_in_parallel() -> None:
    async with serving([answer(0)]) as (port, seen):
        load = Load(port, 5, answers=2)
        await load.open(4, 0.0)
        await until(lambda: load.answers == 8)
        assert len(seen) == 8


async def test_an_endless_load_begins_with_answers_of_all_lengths() -> None:
    """So that the streams do not ask all at once when their first answers end."""
    async with serving([answer(0)]) as (port, seen):
        load = Load(port, 8, answers=0)
        await load.open(4, 0.0)
        await until(lambda: load.answers >= 12)
        load.stop()
        lengths = [json.loads(body)["max_tokens"] for body in seen]
        assert sorted(length for length in lengths if length < 8) == [1, 3, 5, 7]
        assert lengths.count(8) == len(lengths) - 4 >= 8


async def test_a_refusal_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    full = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n"
    async with serving([full, full, answer(7)]) as (port, _):
        load = Load(port, 5, answers=1)
        await load.open(1, 0.0)
        await until(lambda: load.answers == 1)
        assert (load.refused, load.errors) == (2, [])


async def test_errors_and_cut_connections_are_noted() -> None:
    async with serving([b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n"]) as (port, _):
        load = Load(port, 5, answers=1)
        await load.open(1, 0.0)
        await until(lambda: load.errors)
        assert json.loads(load.first_errors())[0].startswith("HTTP/1.1 500 Oh")
    async with serving([b""]) as (port, _):
        load = Load(port, 5, answers=1)
        await load.open(1, 0.0)
        await until(lambda: load.errors)
        assert load.errors == ["connection lost: None"]


async def test_stop_asks_for_nothing_more() -> None:
    async with serving([answer(0)]) as (port, _):
        load = Load(port, 5, answers=0)
        await load.open(1, 0.0)
        await until(lambda: load.answers > 3)
        load.stop()
        answers = load.answers
        await asyncio.sleep(0.05)
        assert load.answers <= answers + 1


def test_the_request_is_a_chat_completion() -> None:
    head, body = request(8000, 7).split(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert f"content-length: {len(body)}".encode() in head
    fields = json.loads(body)
    assert (fields["max_tokens"], fields["stream"], fields["ignore_eos"]) == (7, True, True)


async def test_a_connection_that_was_closed_after_a_refusal_is_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    seen = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n" if seen == 1 else answer(5)
        )
        if seen == 1:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    load = Load(server.sockets[0].getsockname()[1], 5, answers=1)
    await load.open(1, 0.0)
    await until(lambda: load.answers == 1)
    assert (seen, load.refused, load.errors) == (2, 1, [])
    server.close()
