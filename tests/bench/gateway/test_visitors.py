"""Visitors: what they ask for, and how they judge the answer."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from random import Random

import pytest

from vllm_deepinfer.bench.gateway.visitors import ENDINGS, Manner, Outcome, Visit, judge, plan, visit

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
DONE = b"e\r\ndata: [DONE]\n\n\r\n"


def a_visit(manner: Manner = Manner.READ, path: str = "/v1/chat/completions") -> Visit:
    return Visit(path, manner, b"{}", 10, 0.05)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (HEAD + b"data: {}\n\n" + DONE + LAST, Outcome.COMPLETE),
        (HEAD + b"data: {}\n\n" + LAST, Outcome.LOST),  # no end
        (HEAD + DONE + DONE + LAST, Outcome.LOST),  # two ends
        (HEAD + DONE, Outcome.LOST),  # cut after the end
        (HEAD + b'data: {"error":{}}\n\n' + LAST, Outcome.ERROR),
        (HEAD + b'data: {"error":{}}\n\n' + DONE + DONE + LAST, Outcome.LOST),
        (b'HTTP/1.1 429 Too Many\r\n\r\n{"error":{}}', Outcome.ERROR),
        (b"HTTP/1.1 500 Oh\r\n\r\nInternal Server Error", Outcome.LOST),  # an error must be in the API's form
        (b"", Outcome.LOST),
    ],
)
def test_a_stream_is_complete_with_one_end(answer: bytes, outcome: Outcome) -> None:
    assert judge(a_visit(), answer) is outcome


@pytest.mark.parametrize("path", ENDINGS)
def test_every_api_has_its_ending(path: str) -> None:
    for ending in ENDINGS[path]:
        assert judge(a_visit(path=path), HEAD + ending + b"\ndata: {}\n\n" + LAST) is Outcome.COMPLETE
        others = [end for other, ends in ENDINGS.items() if other != path for end in ends]
        for other in others:
            assert judge(a_visit(path=path), HEAD + other + b"\n\n" + LAST) is Outcome.LOST


def test_a_document_must_be_whole() -> None:
    whole = a_visit(Manner.WHOLE)
    assert judge(whole, b'HTTP/1.1 200 OK\r\n\r\n{"id": 1}') is Outcome.COMPLETE
    assert judge(whole, b'HTTP/1.1 200 OK\r\n\r\n{"id": ') is Outcome.LOST


def test_only_who_did_not_read_may_be_cut_off() -> None:
    cut = HEAD + b"data: {}\n\n"
    assert judge(a_visit(Manner.STOP_READING), cut) is Outcome.CUT
    assert judge(a_visit(Manner.DAWDLE), cut) is Outcome.CUT
    assert judge(a_visit(Manner.READ), cut) is Outcome.LOST
    all_but_the_last_chunk = HEAD + ENDINGS["/v1/chat/completions"][0] + b"\n\n\r\n"
    assert judge(a_visit(Manner.STOP_READING), all_but_the_last_chunk) is Outcome.CUT
    for manner in (Manner.DAWDLE, Manner.READ):
        assert judge(a_visit(manner), all_but_the_last_chunk) is Outcome.LOST


def test_plans_cover_everything() -> None:
    rng = Random(0)
    visits = [plan(rng) for _ in range(2000)]
    assert {v.path for v in visits} == set(ENDINGS)
    assert {v.manner for v in visits} == set(Manner)
    assert all(json.loads(v.body)["model"] == "bench" for v in visits)
    streams = Counter(json.loads(v.body)["stream"] for v in visits if v.manner is not Manner.WHOLE)
    assert streams == {True: sum(v.manner is not Manner.WHOLE for v in visits)}
    assert any(json.loads(v.body).get("n") == 2 for v in visits)
    assert [plan(Random(7)) for _ in range(3)] == [plan(Random(7)) for _ in range(3)]


async def serve(answer: bytes) -> tuple[asyncio.Server, int]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


async def test_visits() -> None:
    server, port = await serve(HEAD + b"data: {}\n\n" + DONE + LAST)
    assert await visit(port, a_visit()) is Outcome.COMPLETE
    assert await visit(port, a_visit(Manner.DAWDLE)) is Outcome.COMPLETE
    assert await visit(port, a_visit(Manner.LEAVE)) is Outcome.LEFT
    assert await visit(port, a_visit(Manner.LEAVE_EARLY)) is Outcome.LEFT
    server.close()
    await server.wait_closed()
    assert await visit(port, a_visit()) is Outcome.LOST  # nobody there


async def test_a_server_that_says_nothing_loses_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_deepinfer.bench.gateway.visitors.PATIENCE_S", 0.05)
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    lost: list[str] = []
    assert await visit(server.sockets[0].getsockname()[1], a_visit(), lost.append) is Outcome.LOST
    assert lost == ["/v1/chat/completions read: no end within 0.05 s, done so far: asked, and seen b''"]
    server.close()
