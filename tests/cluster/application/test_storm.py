"""Storms on a fake Serve: two gateways, replicas that die, hang, leave and come, callers that give up."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import replace

import pytest

from tests.cluster.application.fake_serve import CONFIG, FakeReplica, FakeServe
from tests.cluster.application.pools import check_all, pool_on, wanted
from tests.engine.recorder import Recorder, eventually, request_of
from vllm_deepinfer.cluster.application.serve_pool import ServePool
from vllm_deepinfer.engine import EngineError, FinishReason, GenerateRequest, Overloaded

SMALL = replace(CONFIG, max_num_seqs=16, wedge_after_s=0.3)


class Weather:
    """Does something to a replica every few hundredths of a second."""

    def __init__(self, serve: FakeServe, rng: random.Random) -> None:
        self.serve, self.rng = serve, rng
        self.done: dict[str, int] = {}
        self._retiring: list[asyncio.Task[None]] = []

    async def blow(self) -> None:
        while True:
            await asyncio.sleep(self.rng.uniform(0.02, 0.15))
            name = self.rng.choice(self.serve.listed)
            kind = self.rng.choice(["kill", "kill", "crash", "hang", "retire", "refuse", "full"])
            await getattr(self, kind)(self.serve.replicas[name])
            self.done[kind] = self.done.get(kind, 0) + 1

    async def kill(self, replica: FakeReplica) -> None:
        await self.serve.add(SMALL, 32)
        await replica.kill()
        await asyncio.sleep(self.rng.uniform(0, 0.1))  # until the controller knows
        self.serve.unlist(replica.name)

    async def crash(self, replica: FakeReplica) -> None:
        await self.serve.add(SMALL, 32)
        replica.engine.crash()
        await asyncio.sleep(self.rng.uniform(0, 0.1))
        self.serve.unlist(replica.name)

    async def hang(self, replica: FakeReplica) -> None:
        await self.serve.add(SMALL, 32)
        replica.engine.hang()
        await asyncio.sleep(0.5)
        self.serve.unlist(replica.name)

    async def retire(self, replica: FakeReplica) -> None:
        await self.serve.add(SMALL, 32)
        self._retiring.append(asyncio.ensure_future(self.serve.retire(replica.name)))

    async def refuse(self, replica: FakeReplica) -> None:
        replica.engine.faults.refuse = Overloaded("not now", 0.1)
        await asyncio.sleep(0.05)
        replica.engine.faults.refuse = None

    async def full(self, replica: FakeReplica) -> None:
        replica.full = True
        await asyncio.sleep(0.05)
        replica.full = False

    async def end(self) -> None:
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)


async def ask(pool: ServePool, sink: Recorder, request: GenerateRequest) -> None:
    """As a client: refused for want of room, it tries again."""
    while True:
        try:
            await pool.submit(request, sink)
            return
        except Overloaded:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("seed", range(3))
async def test_every_accepted_request_ends_once_with_exactly_its_tokens(seed: int) -> None:
    rng, serve = random.Random(seed), FakeServe()
    for _ in range(3):
        await serve.add(SMALL, 32)
    pools = [pool_on(serve, room_s=30.0, patience_s=30.0) for _ in range(2)]
    for pool in pools:
        await pool.start()
    weather = Weather(serve, rng)
    blowing = asyncio.ensure_future(weather.blow())
    sinks = [Recorder(), Recorder()]
    sent: list[list[GenerateRequest]] = [[], []]
    aborted, cancelled = set[str](), set[str]()

    async def client(number: int) -> None:
        mine = random.Random((seed, number).__repr__())
        rounds = 0
        while rounds < 12 or sum(weather.done.values()) <= 5:  # however quick the machine, it storms
            rounds += 1
            at = mine.randrange(2)
            request = request_of(
                [20 + mine.randrange(900) for _ in range(mine.randint(1, 60))], max_tokens=mine.randint(1, 60)
            )
            task = asyncio.ensure_future(ask(pools[at], sinks[at], request))
            fate = mine.random()
            if fate < 0.1:  # the client goes away while it is placed
                await asyncio.sleep(mine.uniform(0, 0.01))
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                    sent[at].append(request)
                if task.cancelled():
                    cancelled.add(request.request_id)
                    continue
            else:
                await task
                sent[at].append(request)
            if fate > 0.9:
                await asyncio.sleep(mine.uniform(0, 0.03))
                if request.request_id not in sinks[at].finals:
                    aborted.add(request.request_id)
                await pools[at].abort([request.request_id])
            else:
                await sinks[at].ended(request.request_id)

    await asyncio.wait_for(asyncio.gather(*(client(number) for number in range(16))), 120)
    blowing.cancel()
    await asyncio.gather(blowing, return_exceptions=True)
    for sink, requests in zip(sinks, sent, strict=True):
        await sink.ended(*(one.request_id for one in requests))
        check_all(sink, requests, aborted=aborted)
        assert not cancelled & set(sink.tokens), "one that gave up while it was placed sees nothing"
        for one in requests:
            if one.request_id in aborted:
                assert sink.finals[one.request_id].finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
    assert sum(pool.counts["continued"] + pool.counts["rerouted"] for pool in pools) > 0
    alive = [serve.replicas[name] for name in serve.listed]
    await eventually(
        lambda: all(one.engine.load().active_requests == 0 for one in alive if not one.engine._hung)
    )
    await eventually(lambda: all(not pool._live and not pool._leases for pool in pools))
    for pool in pools:
        await pool.close()
    await weather.end()
    await serve.close()


async def test_one_gateway_s_end_is_nothing_to_the_other() -> None:
    serve = FakeServe()
    await serve.add()
    first, second = pool_on(serve), pool_on(serve)
    await first.start()
    await second.start()
    sinks = [Recorder(), Recorder()]
    requests = [request_of([30 + at] * 20, max_tokens=200) for at in range(2)]
    await first.submit(requests[0], sinks[0])
    await second.submit(requests[1], sinks[1])
    await sinks[0].started(requests[0].request_id, 5)
    await first.close()
    assert sinks[0].finals[requests[0].request_id].finish_reason is FinishReason.ERROR
    await sinks[1].ended(requests[1].request_id)
    assert sinks[1].tokens[requests[1].request_id] == wanted(requests[1])
    (replica,) = serve.replicas.values()
    await eventually(lambda: replica.ongoing == 0 and replica.engine.load().active_requests == 0)
    with pytest.raises(EngineError):
        await first.submit(requests[0], sinks[0])
    await second.close()
    await serve.close()
