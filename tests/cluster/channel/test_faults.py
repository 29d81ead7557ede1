"""What happens when an end of the channel dies, stands still, talks nonsense or reads too slowly."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from tests.engine.recorder import Recorder, eventually, prompt_of, request_of
from vllm_deepinfer.cluster.channel import ChannelKeys, EngineServer, RemoteEngine, wire
from vllm_deepinfer.engine import EngineDead, EngineUnavailable, FinishReason, HealthState, collect
from vllm_deepinfer.engine.simulated import SimulatedConfig, SimulatedEngine
from vllm_deepinfer.policy.step_cost import StepCost

ROOT = Path(__file__).parents[3]
CONFIG = SimulatedConfig(
    cost=StepCost(per_step=2e-3, per_token=1e-6), max_model_len=4096, block_size=16, kv_capacity_tokens=65_536
)


@contextmanager
def replica(address: str = "tcp://127.0.0.1:*") -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.channel.replica_process", address],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def here(
    keys: ChannelKeys | None = None, *, beat_s: float = 0.5, silent_s: float = 5.0
) -> AsyncIterator[tuple[SimulatedEngine, EngineServer]]:
    engine = SimulatedEngine(CONFIG)
    await engine.start()
    server = EngineServer(engine, keys=keys, beat_s=beat_s, silent_s=silent_s)
    await server.start()
    try:
        yield engine, server
    finally:
        await server.close()
        await engine.close()


@asynccontextmanager
async def connected(
    address: str, keys: ChannelKeys | None = None, **settings: float
) -> AsyncIterator[RemoteEngine]:
    remote = RemoteEngine(address, keys, **settings)
    await remote.start()
    try:
        yield remote
    finally:
        await remote.close()


async def test_a_replica_killed_in_the_middle_ends_every_request_once_and_is_used_again() -> None:
    with replica() as (process, address):
        async with connected(address, beat_s=0.05, silent_s=0.5) as remote:
            sink = Recorder()
            requests = [request_of(prompt_of(remote, 10, seed), max_tokens=2000) for seed in range(5)]
            await asyncio.gather(*(remote.submit(request, sink) for request in requests))
            await sink.started(requests[0].request_id, 5)
            process.kill()
            await sink.ended(*(request.request_id for request in requests))
            assert {final.finish_reason for final in sink.finals.values()} == {FinishReason.ERROR}
            assert all("not heard" in (final.error or "") for final in sink.finals.values())
            assert remote.health().state is HealthState.DEAD and remote.load().active_requests == 0
            with pytest.raises(EngineUnavailable):
                await remote.submit(request_of([30]), Recorder())
            process.wait()
            with replica(address):
                await eventually(lambda: remote.health().state is HealthState.READY)
                done = await collect(remote, request_of(prompt_of(remote, 10, 1)))
                assert len(done.token_ids) == 16
            assert remote.lost_sessions == 1


async def test_a_replica_that_stands_still_is_lost_and_found_again() -> None:
    with replica() as (process, address):
        async with connected(address, beat_s=0.05, silent_s=0.5) as remote:
            sink, request = Recorder(), request_of(prompt_of(remote, 10, 1), max_tokens=2000)
            await remote.submit(request, sink)
            await sink.started(request.request_id, 3)
            os.kill(process.pid, signal.SIGSTOP)
            await sink.ended(request.request_id)
            os.kill(process.pid, signal.SIGCONT)
            await eventually(lambda: remote.health().state is HealthState.READY)
            # The old session's request is gone there, too, and none of its deltas came here.
            await eventually(lambda: remote.load().active_requests == 0)
            assert len((await collect(remote, request_of(prompt_of(remote, 5, 2)))).token_ids) == 16


async def test_a_gateway_that_dies_leaves_nothing_in_the_engine() -> None:
    async with here(silent_s=0.4, beat_s=0.05) as (engine, server):
        remote = RemoteEngine(server.address)
        await remote.start()
        sink = Recorder()
        requests = [request_of(prompt_of(remote, 10, seed), max_tokens=3000) for seed in range(4)]
        await asyncio.gather(*(remote.submit(request, sink) for request in requests))
        for task in remote._tasks:  # as after SIGKILL: no farewell, no beats
            task.cancel()
        remote._socket.close(linger=0)
        await eventually(lambda: engine.load().active_requests == 0)
        assert server.dropped_sessions == 1 and engine.load().kv_tokens_used == 0


async def test_closing_aborts_at_once() -> None:
    async with here(silent_s=60) as (engine, server):
        remote = RemoteEngine(server.address)
        await remote.start()
        await remote.submit(request_of(prompt_of(remote, 10, 1), max_tokens=3000), Recorder())
        await remote.close()
        await eventually(lambda: engine.load().active_requests == 0)


async def test_a_restarted_server_is_no_continuation() -> None:
    """Same address, same engine, but it knows no sessions: the requests end, later ones are served."""
    async with here() as (_, server), connected(server.address, beat_s=0.05) as remote:
        sink, request = Recorder(), request_of(prompt_of(remote, 10, 1), max_tokens=3000)
        await remote.submit(request, sink)
        server._sessions.clear()
        await sink.ended(request.request_id)
        assert "knows no such session" in (sink.finals[request.request_id].error or "")
        await eventually(lambda: remote.health().state is HealthState.READY)
        assert len((await collect(remote, request_of(prompt_of(remote, 5, 2)))).token_ids) == 16


async def test_a_lost_message_is_an_error_never_a_missing_token() -> None:
    async with here() as (_, server), connected(server.address, beat_s=0.05) as remote:
        sink, request = Recorder(), request_of(prompt_of(remote, 10, 1), max_tokens=3000)
        await remote.submit(request, sink)
        await sink.started(request.request_id, 3)
        (session,) = server._sessions.values()
        session.outbox.sent += 1  # as if step n had gone and not arrived
        await sink.ended(request.request_id)
        final = sink.finals[request.request_id]
        assert final.finish_reason is FinishReason.ERROR and "was lost" in (final.error or "")


async def test_an_abort_that_overtakes_the_engine_s_answer_still_aborts() -> None:
    class Slow(SimulatedEngine):
        async def submit(self, *arguments: object) -> None:  # type: ignore[override]
            await asyncio.sleep(0.1)
            await super().submit(*arguments)  # type: ignore[arg-type]

    engine = Slow(CONFIG)
    await engine.start()
    server = EngineServer(engine)
    await server.start()
    async with connected(server.address) as remote:
        request = request_of(prompt_of(remote, 10, 1), max_tokens=3000)
        task = asyncio.ensure_future(remote.submit(request, Recorder()))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.15)
        await eventually(lambda: engine.load().active_requests == 0)
        assert len((await collect(remote, request)).token_ids) == 3000  # the id is free again
    await server.close()
    await engine.close()


async def test_a_gateway_that_does_not_read_is_merged_then_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with here(silent_s=60) as (engine, server), connected(server.address, silent_s=60) as remote:
        await remote.submit(request_of(prompt_of(remote, 4, 1), max_tokens=3000), Recorder())
        (session,) = server._sessions.values()
        session.outbox._most = 50
        for task in remote._tasks:
            task.cancel()
        await eventually(lambda: engine.load().active_requests == 0)
        assert session.outbox.sent - session.outbox.received == 16, "never more under way than the credit"
        assert server.dropped_sessions == 1


async def test_nonsense_is_counted_and_nothing_else() -> None:
    async with here() as (_, server), connected(server.address) as remote:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(server.address)
        for junk in (b"", b"\x00", b"hello", msgspec.msgpack.encode(["Submit", "x", {}]), b"\xff" * 1000):
            await socket.send(junk)
        await socket.send(wire.encode(wire.Hello(99, "old")))
        answer = wire.from_replica(await socket.recv())
        assert isinstance(answer, wire.Rejected) and "version 99" in answer.reason
        await eventually(lambda: server.bad_messages == 5)
        assert len((await collect(remote, request_of(prompt_of(remote, 5, 2)))).token_ids) == 16
        socket.close(linger=0)
        context.term()


async def test_nobody_answers() -> None:
    remote = RemoteEngine("tcp://127.0.0.1:9", start_s=0.2)
    with pytest.raises(EngineDead, match="no engine replica answered"):
        await remote.start()


@pytest.mark.parametrize("theirs", [None, "others"])
async def test_without_the_keys_nobody_gets_in(theirs: str | None) -> None:
    keys = ChannelKeys.make()
    async with here(keys=keys) as (_, server):
        stranger = RemoteEngine(server.address, None if theirs is None else ChannelKeys.make(), start_s=0.5)
        with pytest.raises(EngineDead):
            await stranger.start()
        # The replica's public key alone is not enough.
        half = ChannelKeys.make()
        thief = ChannelKeys(keys.replica_public, half.gateway_public, b"", half.gateway_secret)
        with pytest.raises(EngineDead):
            await RemoteEngine(server.address, thief, start_s=0.5).start()
        assert not server._sessions
        async with connected(server.address, keys):
            assert len(server._sessions) == 1
