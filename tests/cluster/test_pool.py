"""Several engines as one: the contract; no token lost or doubled when engines die, hang, refuse or leave."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.contract import EngineContract
from tests.engine.recorder import Recorder, eventually, request_of
from vllm_deepinfer.cluster.channel import EngineServer, RemoteEngine
from vllm_deepinfer.cluster.pool import PooledEngine
from vllm_deepinfer.cluster.routers import AggregatedRouter
from vllm_deepinfer.engine import (
    ConstraintKind,
    Engine,
    EngineUnavailable,
    FinishReason,
    GenerateRequest,
    HealthState,
    Overloaded,
    StructuredOutput,
    collect,
)
from vllm_deepinfer.engine.simulated import SimulatedConfig, SimulatedEngine
from vllm_deepinfer.policy.step_cost import StepCost

COST = StepCost(per_step=1e-3, per_token=1e-6)
Pool = tuple[PooledEngine, dict[str, SimulatedEngine]]
CONFIG = SimulatedConfig(cost=COST, max_model_len=512, block_size=16, kv_capacity_tokens=65_536)


def by_place(request: GenerateRequest) -> Callable[[int], int]:
    """Tokens by their place in prompt and answer together: a continuation has to give the same ones."""
    start = len(request.prompt_token_ids)
    key = request.prompt_token_ids[0] + 31 * (request.sampling.seed or 0)
    return lambda position: 20 + (key * 7919 + (start + position) * 104729) % 400


def simulated(config: SimulatedConfig = CONFIG) -> SimulatedEngine:
    return SimulatedEngine(config, tokens=by_place)


def wanted(request: GenerateRequest) -> list[int]:
    answer = by_place(request)
    return [answer(position) for position in range(request.sampling.max_tokens or 0)]


@asynccontextmanager
async def pool_of(count: int = 3, config: SimulatedConfig = CONFIG, **settings: Any) -> AsyncIterator[Pool]:
    engines = {f"w{at}": simulated(config) for at in range(count)}
    for engine in engines.values():
        await engine.start()
    pool = PooledEngine(engines, AggregatedRouter(COST), **{"watch_s": 0.02, "patience_s": 5.0, **settings})
    await pool.start()
    try:
        yield pool, engines
    finally:
        await pool.close()
        for engine in engines.values():
            await engine.close()


def where(pool: PooledEngine, request: GenerateRequest) -> str:
    return pool._live[request.request_id].worker


class TestPooledEngine(EngineContract):
    @pytest.fixture(params=["one", "three", "remote"])
    async def engine(self, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
        if request.param != "remote":
            async with pool_of({"one": 1, "three": 3}[request.param]) as (pool, engines):
                yield pool
                assert all(engine.load().active_requests == 0 for engine in engines.values())
            return
        inner = [simulated() for _ in range(2)]
        servers = [EngineServer(one) for one in inner]
        for one in inner:
            await one.start()
        remotes = {str(at): RemoteEngine(await server.start()) for at, server in enumerate(servers)}
        for remote in remotes.values():
            await remote.start()
        pool = PooledEngine(remotes, AggregatedRouter(COST))
        await pool.start()
        yield pool
        await pool.close()
        for at, remote in enumerate(remotes.values()):
            await remote.close()
            await servers[at].close()
            await inner[at].close()

    async def test_one_call_serves_all_streams_of_a_step(self, engine: Engine) -> None:
        """Per worker; the pool of one is as the engine itself."""
        if len(engine._workers) == 1:  # type: ignore[attr-defined]
            await super().test_one_call_serves_all_streams_of_a_step(engine)


async def test_requests_are_spread() -> None:
    async with pool_of(3) as (pool, engines):
        sink = Recorder()
        requests = [request_of([30 + at] * 40, max_tokens=100) for at in range(9)]
        for request in requests:
            await pool.submit(request, sink)
        assert sorted(engine.load().active_requests for engine in engines.values()) == [3, 3, 3]
        await pool.abort(request.request_id for request in requests)


async def test_a_crash_after_some_tokens_is_not_seen_by_the_caller() -> None:
    async with pool_of(2) as (pool, engines):
        sink = Recorder()
        requests = [request_of([30 + at] * 20, max_tokens=120) for at in range(8)]
        for request in requests:
            await pool.submit(request, sink)
        await sink.started(requests[0].request_id, 20)
        engines[where(pool, requests[0])].crash()
        await sink.ended(*(request.request_id for request in requests))
        for request in requests:
            assert sink.tokens[request.request_id] == wanted(request)
            assert sink.finals[request.request_id].finish_reason is FinishReason.LENGTH
        assert pool.counts["continued"] == 4 and pool.counts["not_continued"] == 0


async def test_a_crash_before_the_first_token_routes_again() -> None:
    async with pool_of(2) as (pool, engines):
        for engine in engines.values():
            engine.hang()
        sink, request = Recorder(), request_of([30] * 20)
        await pool.submit(request, sink)
        engines[where(pool, request)].crash()
        for engine in engines.values():
            engine.resume()
        await sink.ended(request.request_id)
        assert sink.tokens[request.request_id] == wanted(request) and pool.counts["rerouted"] == 1


async def test_a_wedged_engine_s_requests_move() -> None:
    config = SimulatedConfig(
        cost=COST, max_model_len=512, block_size=16, kv_capacity_tokens=65_536, wedge_after_s=0.1
    )
    engines = {name: SimulatedEngine(config, tokens=by_place) for name in "ab"}
    for engine in engines.values():
        await engine.start()
    pool = PooledEngine(engines, AggregatedRouter(COST), watch_s=0.02)
    await pool.start()
    sink, request = Recorder(), request_of([30] * 20, max_tokens=100)
    await pool.submit(request, sink)
    await sink.started(request.request_id, 10)
    wedged = engines[where(pool, request)]
    wedged.hang()
    await sink.ended(request.request_id)
    wedged.resume()
    await asyncio.sleep(0.05)  # its late deltas, if it had any, must reach nobody
    assert sink.tokens[request.request_id] == wanted(request)
    assert wedged.load().active_requests == 0
    await pool.close()
    for engine in engines.values():
        await engine.close()


async def test_a_removed_worker_s_requests_move_and_a_new_one_takes_some() -> None:
    async with pool_of(1) as (pool, engines):
        sink, request = Recorder(), request_of([30] * 20, max_tokens=100)
        await pool.submit(request, sink)
        await sink.started(request.request_id, 5)
        pool.remove("w0")
        assert pool.health().state is HealthState.DEAD
        with pytest.raises(EngineUnavailable):
            await pool.submit(request_of([1, 2]), sink)
        engines["new"] = simulated()
        await engines["new"].start()
        pool.add("new", engines["new"])
        await sink.ended(request.request_id)
        assert sink.tokens[request.request_id] == wanted(request)


async def test_a_worker_of_another_model_is_refused() -> None:
    other = SimulatedEngine(
        SimulatedConfig(cost=COST, max_model_len=256, block_size=16, kv_capacity_tokens=65_536)
    )
    await other.start()
    async with pool_of(1) as (pool, _):
        with pytest.raises(EngineUnavailable, match="max_model_len 256, but its pool has 512"):
            pool.add("other", other)
    await other.close()


COUNTED: Any = [
    ({"seed": 7}, "seeded"),
    ({"presence_penalty": 0.5}, "penalties"),
    ({"structured": StructuredOutput(kind=ConstraintKind.JSON_OBJECT)}, "constraint"),
]


@pytest.mark.parametrize("sampling", [case[0] for case in COUNTED])
async def test_what_counts_from_the_first_token_is_repeated(sampling: dict[str, Any]) -> None:
    """Twice lost; the caller has every token once, and the engine was asked for the whole prompt again."""
    async with pool_of(3) as (pool, engines):
        sink, request = Recorder(), request_of([30] * 20, max_tokens=100, **sampling)
        await pool.submit(request, sink)
        for tokens in (5, 40):
            await sink.started(request.request_id, tokens)
            engines[where(pool, request)].crash("gone.")
        await sink.ended(request.request_id)
        assert sink.tokens[request.request_id] == wanted(request)
        assert pool.counts["continued"] == 2 and not pool.counts["not_continued"]


@pytest.mark.parametrize(("sampling", "reason"), COUNTED)
async def test_what_cannot_be_continued_ends_with_the_reason(sampling: dict[str, Any], reason: str) -> None:
    async with pool_of(2, replace(CONFIG, forces_tokens=False)) as (pool, engines):
        sink, request = Recorder(), request_of([30] * 20, max_tokens=100, **sampling)
        await pool.submit(request, sink)
        await sink.started(request.request_id, 5)
        engines[where(pool, request)].crash("gone.")
        await sink.ended(request.request_id)
        final = sink.finals[request.request_id]
        assert final.finish_reason is FinishReason.ERROR and reason in (final.error or "")
        assert pool.counts["not_continued"] == 1


async def test_a_refusal_tries_the_next_and_the_last_refusal_is_told() -> None:
    async with pool_of(2) as (pool, engines):
        engines["w0"].faults.refuse = Overloaded("full", 2.0)
        assert (await collect(pool, request_of([30] * 20))).token_ids
        assert pool.counts["refusals"] == 1
        engines["w1"].faults.refuse = Overloaded("full too", 1.0)
        with pytest.raises(Overloaded) as caught:
            await pool.submit(request_of([30] * 20), Recorder())
        assert caught.value.retry_after_s == 1.0


async def test_a_request_s_own_failure_is_its_own() -> None:
    async with pool_of(2) as (pool, engines):
        for engine in engines.values():
            engine.faults.fail_requests[1] = 3
        sink, request = Recorder(), request_of([30] * 20)
        await pool.submit(request, sink)
        await sink.ended(request.request_id)
        assert sink.finals[request.request_id].finish_reason is FinishReason.ERROR
        assert not pool.counts["continued"] and not pool.counts["rerouted"]


async def test_no_engine_is_left() -> None:
    async with pool_of(2, patience_s=0.2) as (pool, engines):
        sink, request = Recorder(), request_of([30] * 20, max_tokens=400)
        await pool.submit(request, sink)
        await sink.started(request.request_id, 2)
        for engine in engines.values():
            engine.crash()
        await sink.ended(request.request_id)
        assert "no other took the request" in (sink.finals[request.request_id].error or "")


@pytest.mark.parametrize("seed", range(3))
async def test_a_storm_of_requests_under_crashes(seed: int) -> None:
    """200 requests, an engine crashed and replaced every 30 ms: each ends once with exactly its tokens."""
    rng = random.Random(seed)
    async with pool_of(3, attempts=50, patience_s=20.0) as (pool, engines):
        sink, requests = Recorder(), list[GenerateRequest]()
        stop = asyncio.Event()

        async def killer() -> None:
            number = 0
            while not stop.is_set():
                await asyncio.sleep(0.03)
                number += 1
                name = rng.choice([name for name in engines if name in pool._workers])
                engines[name].crash()
                pool.remove(name)
                engines[f"n{number}"] = simulated()
                await engines[f"n{number}"].start()
                pool.add(f"n{number}", engines[f"n{number}"])

        task = asyncio.ensure_future(killer())
        for at in range(200):
            request = request_of([21 + at] * rng.randint(1, 60), max_tokens=rng.randint(1, 60))
            requests.append(request)
            await pool.submit(request, sink)
            if rng.random() < 0.3:
                await asyncio.sleep(0.002)
        aborted = set(rng.sample([request.request_id for request in requests], 20))
        await pool.abort(aborted)
        await sink.ended(*(request.request_id for request in requests))
        stop.set()
        await task
        for request in requests:
            tokens, final = sink.tokens[request.request_id], sink.finals[request.request_id]
            assert tokens == wanted(request)[: len(tokens)]
            if request.request_id not in aborted:
                assert final.finish_reason is FinishReason.LENGTH and tokens == wanted(request)
        await eventually(lambda: pool.load().active_requests == 0)
        assert pool.counts["continued"] > 0
