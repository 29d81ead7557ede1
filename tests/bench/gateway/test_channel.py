"""The token channel: an engine in another process keeps the promises of the Engine protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from vllm_deepinfer.bench.gateway.channel import ChannelEngine, Frames, Step, Submit
from vllm_deepinfer.bench.gateway.upstream import HttpStream, HttpStreams, Options, TokenChannel, Upstream
from vllm_deepinfer.engine import (
    EngineDead,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    HealthState,
    Load,
    SamplingParams,
    TokenDelta,
)

WORDS = [(10, "a"), (11, '"'), (12, "c")]


def request(name: str, tokens: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_token_ids=[1, 2, 3], sampling=sampling)


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[tuple[ChannelEngine, Upstream, asyncio.Server]]:
    upstream = Upstream(Options(step_ms=1.0, words=WORDS))
    await upstream.engine.start()
    path = str(tmp_path / "engine")
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(lambda: TokenChannel(upstream).frames, path)
    engine = ChannelEngine(path, EngineInfo(model="m", max_model_len=100))
    await engine.start()
    try:
        yield engine, upstream, server
    finally:
        await engine.close()
        server.close()
        await upstream.engine.close()


async def test_an_answer_comes_through(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, upstream, _):
        deltas: list[TokenDelta] = []
        await engine.submit(request("r", 5), deltas.extend)
        await engine.drain()
        ids = [token for delta in deltas for token in delta.token_ids]
        assert len(ids) == 5
        start = ids[0] - 10
        assert ids == [WORDS[(start + i) % 3][0] for i in range(5)]
        assert [delta.finish_reason for delta in deltas] == [None] * 4 + [FinishReason.LENGTH]
        assert engine.health().state is HealthState.READY
        assert engine.load().active_requests == 0
        ((arrived, left),) = msgspec.json.decode(upstream.take_records()).values()
        assert left > arrived
        assert upstream.take_records() == "{}"


async def test_requests_of_one_step_come_in_one_call(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, _, _):
        steps: list[list[str]] = []

        def sink(deltas: list[TokenDelta]) -> None:
            steps.append([delta.request_id for delta in deltas])

        for name in ("a", "b", "c"):
            await engine.submit(request(name, 4), sink)  # type: ignore[arg-type]
        await engine.drain()
        assert ["a", "b", "c"] in steps
        assert sum(map(len, steps)) == 12


async def test_abort_ends_at_once_and_once(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, upstream, _):
        deltas: list[TokenDelta] = []
        await engine.submit(request("r", 90), deltas.extend)
        await engine.abort(["r", "nobody"])
        assert [delta.finish_reason for delta in deltas][-1] is FinishReason.ABORT
        await engine.abort(["r"])
        before = len(deltas)
        while upstream.engine.load().active_requests:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert len(deltas) == before


async def test_a_lost_engine_ends_every_request_with_an_error(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, _, _):
        deltas: list[TokenDelta] = []
        await engine.submit(request("r", 90), deltas.extend)
        await engine.close()
        assert deltas[-1].finish_reason is FinishReason.ERROR
        assert deltas[-1].error == "the engine process has gone."
        assert engine.health().state is HealthState.DEAD
        with pytest.raises(EngineDead):
            await engine.submit(request("s", 1), deltas.extend)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_frames_survive_any_cut(size: int) -> None:
    got: list[bytes] = []
    frames = Frames(lambda message: got.append(bytes(message)), lambda: None)
    messages = [b"", b"a", b"hello" * 50, b"\x00\x00\x00\x01"]
    wire = b"".join(len(message).to_bytes(4, "big") + message for message in messages)
    for start in range(0, len(wire), size):
        frames.data_received(wire[start : start + size])
    assert got == messages


def test_messages_round_trip() -> None:
    wire = msgspec.msgpack.encode(Submit(request("r", 3)))
    decoded = msgspec.msgpack.decode(wire, type=Submit).request
    assert (decoded.request_id, list(decoded.prompt_token_ids)) == ("r", [1, 2, 3])
    assert decoded.sampling.max_tokens == 3
    step = Step([TokenDelta("r", [1], FinishReason.STOP)], Load(running_requests=3))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=Step)
    assert (list(again.deltas), again.load) == (step.deltas, step.load)


async def test_the_http_side_streams_as_vllm_does() -> None:
    upstream = Upstream(Options(step_ms=1.0, words=WORDS))
    await upstream.engine.start()
    streams = HttpStreams(upstream)
    server = await asyncio.get_running_loop().create_server(lambda: HttpStream(streams), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
    writer.write(b"GET /health HTTP/1.1\r\n\r\n")
    assert (
        await reader.readuntil(b"{}")
        == b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    )
    body = b'{"max_tokens": 4}'
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 17\r\n\r\n" + body[:5])
    await asyncio.sleep(0.01)
    writer.write(body[5:])
    answer = await reader.readuntil(b"0\r\n\r\n")
    events = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: {")]
    texts = [msgspec.json.decode(event)["choices"][0]["delta"]["content"] for event in events]
    assert len(texts) == 4 and set(texts) == {"a", '"', "c"}
    assert answer.count(b"data: [DONE]") == 1
    writer.close()
    server.close()
    await upstream.engine.close()
