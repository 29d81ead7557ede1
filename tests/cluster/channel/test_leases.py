"""A lease ends with its request, whichever of the two came first, and leaves nothing behind."""

from __future__ import annotations

import asyncio

import pytest

from tests.engine.recorder import Recorder, eventually, request_of
from vllm_deepinfer.cluster.channel import EngineServer, RemoteEngine
from vllm_deepinfer.cluster.channel.leases import Leases
from vllm_deepinfer.engine import Overloaded
from vllm_deepinfer.engine.simulated import SimulatedEngine


async def test_ends_with_its_request_whichever_came_first() -> None:
    leases = Leases()
    first = asyncio.ensure_future(leases.hold("lease first"))
    await asyncio.sleep(0)
    leases.claim("lease first", "w1")
    leases.claim("request first", "w2")
    second = asyncio.ensure_future(leases.hold("request first"))
    await asyncio.sleep(0.01)
    assert len(leases) == 2 and not first.done() and not second.done()
    leases.end(["w2", "unknown"])
    assert await second and not first.done()
    leases.end(["w1"])
    assert await first and len(leases) == 0


async def test_a_request_that_ended_before_its_lease_came() -> None:
    leases = Leases()
    leases.claim("k", "w")
    leases.end(["w"])
    assert await asyncio.wait_for(leases.hold("k"), 1)


async def test_unclaimed_and_unleased_are_forgotten() -> None:
    leases = Leases(claim_s=0.02)
    assert not await leases.hold("nobody comes")
    leases.claim("no lease comes", "w")
    await asyncio.sleep(0.05)
    leases.end(["w"])
    assert leases.unclaimed == 1 and not leases._claims and not leases._keys and not leases._living


async def test_over_the_channel() -> None:
    """Held until the final delta; a refused request and a lost gateway end theirs too."""
    engine = SimulatedEngine()
    await engine.start()
    server = EngineServer(engine, silent_s=0.5)
    remote = RemoteEngine(await server.start(), beat_s=0.1)
    await remote.start()
    try:
        held = asyncio.ensure_future(server.leases.hold("a"))
        recorder = Recorder()
        await remote.submit(request_of([1, 2, 3], max_tokens=5), recorder, lease="a")
        assert not held.done()
        assert await asyncio.wait_for(held, 5)
        lost = asyncio.ensure_future(server.leases.hold("b"))
        await remote.submit(request_of([1, 2, 3], max_tokens=20_000), recorder, lease="b")
        await remote.close()
        assert await asyncio.wait_for(lost, 5)
    finally:
        await remote.close()
        await server.close()
        await engine.close()


async def test_one_request_too_many_of_all_gateways_is_refused_and_holds_nothing() -> None:
    engine = SimulatedEngine()
    await engine.start()
    server = EngineServer(engine, most_active=2)
    address = await server.start()
    gateways = [RemoteEngine(address), RemoteEngine(address)]
    recorder = Recorder()
    try:
        long = [request_of([1, 2, 3], max_tokens=20_000) for _ in gateways]
        for gateway, request in zip(gateways, long, strict=True):
            await gateway.start()
            await gateway.submit(request, recorder)
        held = asyncio.ensure_future(server.leases.hold("c"))
        third = request_of([1, 2, 3], max_tokens=5)
        with pytest.raises(Overloaded, match="has its 2 requests") as refused:
            await gateways[0].submit(third, recorder, lease="c")
        assert refused.value.retry_after_s > 0 and engine.load().active_requests == 2
        assert await asyncio.wait_for(held, 5), "its lease ends with the refusal"
        await gateways[1].abort([long[1].request_id])
        await eventually(lambda: sum(len(one.alive) for one in server._sessions.values()) == 1)
        await gateways[0].submit(third, recorder)
        await recorder.ended(third.request_id)
    finally:
        for gateway in gateways:
            await gateway.close()
        await server.close()
        await engine.close()
