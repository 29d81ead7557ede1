"""Two pools as one engine: the contract; no token lost or doubled, no KV held, whatever dies or refuses."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from tests.engine.contract import EngineContract
from tests.engine.recorder import Recorder, eventually, request_of
from vllm_deepinfer.cluster.channel import EngineServer, RemoteEngine
from vllm_deepinfer.cluster.disaggregated import DisaggregatedEngine
from vllm_deepinfer.cluster.pool import PooledEngine
from vllm_deepinfer.cluster.routers import AggregatedRouter
from vllm_deepinfer.engine import (
    Engine,
    EngineInfo,
    EngineUnavailable,
    FinishReason,
    GenerateRequest,
    HealthState,
    InvalidRequest,
    Load,
    Overloaded,
    collect,
)
from vllm_deepinfer.engine.simulated import SimulatedConfig, SimulatedEngine
from vllm_deepinfer.policy.step_cost import StepCost

COST = StepCost(per_step=1e-3, per_token=1e-6)
CONFIG = SimulatedConfig(cost=COST, max_model_len=512, block_size=16, kv_capacity_tokens=65_536)
STORMS = int(os.environ.get("DEEPINFER_TEST_STORMS", "4"))


def by_place(request: GenerateRequest) -> Callable[[int], int]:
    """Tokens by their place in prompt and answer together: a continuation has to give the same ones."""
    start = len(request.prompt_token_ids)
    key = request.prompt_token_ids[0] + 31 * (request.sampling.seed or 0)
    return lambda position: 20 + (key * 7919 + (start + position) * 104729) % 400


def wanted(request: GenerateRequest) -> list[int]:
    answer = by_place(request)
    return [answer(position) for position in range(request.sampling.max_tokens or 0)]


async def simulated(**changes: Any) -> SimulatedEngine:
    engine = SimulatedEngine(replace(CONFIG, **changes), tokens=by_place)
    await engine.start()
    return engine


@dataclass
class Two:
    """A disaggregated engine over one prefill and one decode engine."""

    engine: DisaggregatedEngine
    prefill: SimulatedEngine
    decode: SimulatedEngine

    def is_empty(self) -> bool:
        empty = Load(kv_tokens_free=CONFIG.kv_capacity_tokens)
        return all(
            one.load() == empty or one.health().state is HealthState.DEAD
            for one in (self.prefill, self.decode)
        )


@asynccontextmanager
async def two(
    prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Two]:
    engines = await simulated(**(prefill or {})), await simulated(**(decode or {}))
    engine = DisaggregatedEngine(*engines, **{"patience_s": 5.0, "retry_s": 0.01, **settings})
    await engine.start()
    all_of_it = Two(engine, *engines)
    try:
        yield all_of_it
        if engine.health().state is not HealthState.DEAD:
            await eventually(all_of_it.is_empty)
            assert not engine._by_attempt and engine.load().active_requests == 0
    finally:
        await engine.close()
        for one in engines:
            await one.close()


class TestDisaggregatedEngine(EngineContract):
    queues_elsewhere = True

    @pytest.fixture(params=["two engines", "two pools", "remote pools"])
    async def engine(self, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
        if request.param == "two engines":
            async with two() as made:
                yield made.engine
            return
        async with pools(2, 2, remote="remote" in request.param) as made:
            yield made.engine

    async def test_one_call_serves_all_streams_of_a_step(self, engine: Engine) -> None:
        """Per decode engine; here with one."""
        if isinstance(engine._decode, SimulatedEngine):  # type: ignore[attr-defined]
            await super().test_one_call_serves_all_streams_of_a_step(engine)


@dataclass
class Pools:
    """A disaggregated engine over two pools of simulated engines, all in `engines`."""

    engine: DisaggregatedEngine
    prefill: PooledEngine
    decode: PooledEngine
    engines: dict[str, SimulatedEngine]

    def held(self) -> int:
        alive = [one for one in self.engines.values() if one.health().state is not HealthState.DEAD]
        return sum(one.load().kv_tokens_used for one in alive)


@asynccontextmanager
async def pools(
    prefills: int, decodes: int, *, remote: bool = False, **settings: Any
) -> AsyncIterator[Pools]:
    engines = {f"p{at}": await simulated() for at in range(prefills)}
    engines |= {f"d{at}": await simulated() for at in range(decodes)}
    workers: dict[str, Engine] = dict(engines)
    servers: list[EngineServer] = []
    if remote:
        for name, one in engines.items():
            servers.append(EngineServer(one))
            workers[name] = RemoteEngine(await servers[-1].start())
            await workers[name].start()
    made = []
    for kind in "pd":
        ours = {name: one for name, one in workers.items() if name[0] == kind}
        made.append(PooledEngine(ours, AggregatedRouter(COST), watch_s=0.02, patience_s=10.0, attempts=50))
        await made[-1].start()
    engine = DisaggregatedEngine(*made, **{"patience_s": 10.0, "retry_s": 0.01, "losses": 50, **settings})
    await engine.start()
    all_of_it = Pools(engine, made[0], made[1], engines)
    try:
        yield all_of_it
        await eventually(lambda: all_of_it.held() == 0)
    finally:
        await engine.close()
        for pool in made:
            await pool.close()
        if remote:
            for worker in workers.values():
                await worker.close()
            for server in servers:
                await server.close()
        for simulation in engines.values():
            await simulation.close()


# The ordinary way


async def test_the_prompt_is_prefilled_there_and_the_answer_comes_from_here() -> None:
    async with two() as made:
        request = request_of([30] * 100, max_tokens=20)
        done = await collect(made.engine, request)
        assert done.token_ids == wanted(request) and done.finish_reason is FinishReason.LENGTH
        assert +made.decode.counts == {"fetched": 1}
        assert +made.engine.counts == {"handed_over": 1}
        # A fetch ends the hold; the abort that follows the first token finds nothing.
        assert made.prefill.counts["released"] == 0 and made.prefill.counts["expired"] == 0


async def test_cached_tokens_are_those_of_the_prefill_engine() -> None:
    async with two() as made:
        prompt = [30] * 100
        assert (await collect(made.engine, request_of(prompt))).cached_tokens == 0
        assert (await collect(made.engine, request_of(prompt))).cached_tokens == 96
        assert (await collect(made.engine, request_of(prompt, salt="other"))).cached_tokens == 0


async def test_the_answer_is_sampled_as_asked_and_the_prefill_is_not() -> None:
    async with two() as made:
        seen: list[GenerateRequest] = []
        for engine in (made.prefill, made.decode):
            submit = engine.submit

            async def spy(request: GenerateRequest, sink: Any, submit: Any = submit) -> None:
                seen.append(request)
                await submit(request, sink)

            engine.submit = spy  # type: ignore[method-assign]
        request = request_of([30] * 50, temperature=0.7, seed=5, logprobs=2, stop_token_ids=[9], salt="s")
        done = await collect(made.engine, request)
        assert done.logprobs is not None and len(done.logprobs) == 16
        first, second = seen
        assert (first.sampling.max_tokens, first.sampling.seed, first.cache_salt) == (1, None, "s")
        assert first.hand_over is not None and first.hand_over.keep
        assert second.sampling == request.sampling and second.cache_salt == "s"
        assert second.hand_over is not None and second.hand_over.source is not None


@pytest.mark.parametrize(("length", "direct"), [(10, True), (19, True), (20, False)])
async def test_short_prompts_stay_with_decode(length: int, direct: bool) -> None:
    async with two(shortest=20) as made:
        request = request_of([30] * length)
        assert (await collect(made.engine, request)).token_ids == wanted(request)
        assert made.engine.counts["direct"] == direct and made.engine.counts["handed_over"] == (not direct)


async def test_prompt_logprobs_are_computed_where_they_are_asked_for() -> None:
    async with two() as made:
        await collect(made.engine, request_of([30] * 40, prompt_logprobs=1))
        assert +made.engine.counts == {"direct": 1}


# Failures


async def test_a_fetch_that_fails_is_computed_and_the_hold_is_released() -> None:
    async with two() as made:
        made.decode.faults.fail_fetches = 1
        request = request_of([30] * 100)
        assert (await collect(made.engine, request)).token_ids == wanted(request)
        assert made.decode.counts["recomputed"] == 1
        await eventually(lambda: made.prefill.load().held_requests == 0)
        assert made.prefill.counts["released"] == 1, "not by the lease, which is a minute"


async def test_a_lost_prefill_engine_is_replaced_by_decode() -> None:
    async with two() as made:
        made.prefill.hang()
        sink, request = Recorder(), request_of([30] * 100)
        await made.engine.submit(request, sink)
        made.prefill.crash()
        await sink.ended(request.request_id)
        assert sink.tokens[request.request_id] == wanted(request)
        assert +made.engine.counts == {"lost_prefill": 1, "prefill_down": 1}
        health = made.engine.health()
        assert health.state is HealthState.READY and "computes prompts itself" in health.detail
        assert (await collect(made.engine, request_of([31] * 100))).token_ids


async def test_a_lost_decode_engine_after_tokens_goes_through_prefill_again() -> None:
    async with pools(1, 2) as made:
        sink, request = Recorder(), request_of([30] * 60, max_tokens=120)
        await made.engine.submit(request, sink)
        await sink.started(request.request_id, 10)
        serving = next(name for name in ("d0", "d1") if made.engines[name].load().active_requests)
        made.engines[serving].crash()
        await sink.ended(request.request_id)
        assert sink.tokens[request.request_id] == wanted(request)
        assert sink.finals[request.request_id].finish_reason is FinishReason.LENGTH
        assert +made.engine.counts == {"handed_over": 1, "continued": 1}
        other = made.engines["d1" if serving == "d0" else "d0"]
        assert other.counts["fetched"] == 1


async def test_a_short_continuation_may_be_left_to_decode() -> None:
    async with pools(1, 2, recompute_up_to=1000) as made:
        sink, request = Recorder(), request_of([30] * 60, max_tokens=120)
        await made.engine.submit(request, sink)
        await sink.started(request.request_id, 10)
        serving = next(name for name in ("d0", "d1") if made.engines[name].load().active_requests)
        made.engines[serving].crash()
        await sink.ended(request.request_id)
        assert sink.tokens[request.request_id] == wanted(request)
        assert made.engine.counts["direct"] == 1


async def test_a_seeded_answer_is_repeated_behind_the_scenes() -> None:
    async with pools(1, 2) as made:
        sink, request = Recorder(), request_of([30] * 20, max_tokens=100, seed=7)
        await made.engine.submit(request, sink)
        await sink.started(request.request_id, 5)
        for name in ("d0", "d1"):
            if made.engines[name].load().active_requests:
                made.engines[name].crash("gone.")
        await sink.ended(request.request_id)
        assert sink.tokens[request.request_id] == wanted(request)
        assert made.engine.counts["continued"] == 1 and not made.engine.counts["not_continued"]


async def test_what_cannot_be_continued_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedConfig, "info", _without_forcing(SimulatedConfig.info))
    async with pools(1, 2) as made:
        sink, request = Recorder(), request_of([30] * 20, max_tokens=100, seed=7)
        await made.engine.submit(request, sink)
        await sink.started(request.request_id, 5)
        for name in ("d0", "d1"):
            if made.engines[name].load().active_requests:
                made.engines[name].crash("gone.")
        await sink.ended(request.request_id)
        final = sink.finals[request.request_id]
        assert final.finish_reason is FinishReason.ERROR and "seeded" in (final.error or "")
        assert final.stop_reason is None and made.engine.counts["not_continued"] == 1


async def test_an_engine_s_own_failure_of_a_request_is_told() -> None:
    async with two() as made:
        made.decode.faults.fail_requests[1] = 3
        sink, request = Recorder(), request_of([30] * 20)
        await made.engine.submit(request, sink)
        await sink.ended(request.request_id)
        assert sink.finals[request.request_id].finish_reason is FinishReason.ERROR
        assert "told to fail" in (sink.finals[request.request_id].error or "")
        assert sink.tokens[request.request_id] == wanted(request)[:3]


async def test_refusals_by_prefill_are_the_submit_s() -> None:
    async with two() as made:
        made.prefill.faults.refuse = Overloaded("full", 2.0)
        with pytest.raises(Overloaded, match="full"):
            await made.engine.submit(request_of([30] * 20), Recorder())
        assert made.engine.load().active_requests == 0


async def test_decode_without_room_is_waited_for() -> None:
    async with two() as made:
        made.decode.faults.refuse = Overloaded("full", 2.0)
        sink, request = Recorder(), request_of([30] * 20)
        await made.engine.submit(request, sink)
        await eventually(lambda: made.engine.counts["waited"] == 1)
        assert made.engine.load().active_requests == 1 and made.prefill.load().held_requests == 1
        made.decode.faults.refuse = None
        await sink.ended(request.request_id)
        assert sink.tokens[request.request_id] == wanted(request)


async def test_patience_with_decode_ends() -> None:
    async with two(patience_s=0.1) as made:
        made.decode.faults.refuse = Overloaded("full", 2.0)
        sink, request = Recorder(), request_of([30] * 20)
        await made.engine.submit(request, sink)
        await sink.ended(request.request_id)
        final = sink.finals[request.request_id]
        assert (final.finish_reason, final.error) == (FinishReason.ERROR, "full")


async def test_no_engine_is_left() -> None:
    async with two(patience_s=0.1) as made:
        sink, request = Recorder(), request_of([30] * 20, max_tokens=400)
        await made.engine.submit(request, sink)
        await sink.started(request.request_id, 2)
        made.decode.crash()
        made.prefill.crash()
        await sink.ended(request.request_id)
        assert "no other took the request" in (sink.finals[request.request_id].error or "")
        assert made.engine.health().state is HealthState.DEAD
        with pytest.raises(EngineUnavailable):
            await made.engine.submit(request_of([1, 2, 3]), sink)


@pytest.mark.parametrize("layout", ["other", None])
async def test_pools_that_do_not_fit_do_not_start(layout: str | None) -> None:
    prefill, decode = await simulated(), await simulated(kv_layout=layout or "")
    engine = DisaggregatedEngine(prefill, decode)
    if layout is None:
        await engine.start()
    else:
        with pytest.raises(EngineUnavailable, match="layout"):
            await engine.start()
        with pytest.raises(EngineUnavailable, match="not been started"):
            await engine.submit(request_of([1, 2]), Recorder())
    await prefill.close()
    await decode.close()


async def test_what_decode_could_never_serve_is_refused_before_it_is_prefilled() -> None:
    async with two(decode={"max_model_len": 256}) as made:
        with pytest.raises(InvalidRequest, match="context is 256"):
            await made.engine.submit(request_of([30] * 300), Recorder())
        assert made.engine.info.max_model_len == 256 and not +made.engine.counts


# Aborts at every point


async def test_an_abort_at_any_moment_leaves_nothing() -> None:
    """Prefill, hold, fetch and decode take several loop turns each; the abort comes after n of them."""
    for turns in range(60):
        async with two(decode={"transfer_latency_s": 2e-3}) as made:
            sink, request = Recorder(), request_of([30] * 100, max_tokens=400)
            await made.engine.submit(request, sink)
            for _ in range(turns):
                await asyncio.sleep(0.0002)
            await made.engine.abort([request.request_id])
            assert sink.finals[request.request_id].finish_reason is FinishReason.ABORT
            assert (
                sink.tokens.get(request.request_id, [])
                == wanted(request)[: len(sink.tokens[request.request_id])]
            )
            assert made.engine.load().active_requests == 0
            await eventually(made.is_empty)


async def test_an_abort_while_decode_has_no_room_releases_the_hold() -> None:
    async with two() as made:
        made.decode.faults.refuse = Overloaded("full")
        sink, request = Recorder(), request_of([30] * 100)
        await made.engine.submit(request, sink)
        await eventually(lambda: made.prefill.load().held_requests == 1)
        await made.engine.abort([request.request_id])
        assert made.prefill.load().held_requests == 0


async def test_closing_ends_what_is_alive_and_releases_it() -> None:
    async with two() as made:
        made.decode.faults.refuse = Overloaded("full")
        sink = Recorder()
        requests = [request_of([30 + at] * 100) for at in range(5)]
        for request in requests:
            await made.engine.submit(request, sink)
        await eventually(lambda: made.prefill.load().held_requests == 5)
        await made.engine.close()
        assert {final.finish_reason for final in sink.finals.values()} == {FinishReason.ERROR}
        assert made.prefill.load().held_requests == 0


# Storms


@pytest.mark.parametrize("seed", range(STORMS))
async def test_a_storm_of_requests_under_crashes(seed: int) -> None:
    """200 requests, an engine of either pool crashed and replaced every 25 ms, fetches that fail.

    Each request ends once with exactly its tokens, and nothing is held when all have ended.
    """
    rng = random.Random(seed)
    async with pools(2, 3) as made:
        sink, requests, stop = Recorder(), list[GenerateRequest](), asyncio.Event()

        async def killer() -> None:
            number = 0
            while not stop.is_set():
                await asyncio.sleep(0.025)
                number += 1
                pool = rng.choice([made.prefill, made.decode])
                name = rng.choice(list(pool._workers))
                made.engines[name].crash()
                pool.remove(name)
                fresh = f"{name[0]}n{number}"
                made.engines[fresh] = await simulated()
                made.engines[fresh].faults.fail_fetches = rng.choice([0, 0, 3])
                pool.add(fresh, made.engines[fresh])

        task = asyncio.ensure_future(killer())
        for at in range(200):
            request = request_of([21 + at] * rng.randint(1, 60), max_tokens=rng.randint(1, 60))
            requests.append(request)
            await made.engine.submit(request, sink)
            if rng.random() < 0.3:
                await asyncio.sleep(0.002)
        aborted = set(rng.sample([request.request_id for request in requests], 20))
        await made.engine.abort(aborted)
        await sink.ended(*(request.request_id for request in requests))
        stop.set()
        await task
        for request in requests:
            tokens, final = sink.tokens[request.request_id], sink.finals[request.request_id]
            assert tokens == wanted(request)[: len(tokens)]
            if request.request_id not in aborted:
                assert final.finish_reason is FinishReason.LENGTH and tokens == wanted(request), final
        assert made.engine.counts["continued"] > 0 and made.engine.counts["not_continued"] == 0


def _without_forcing(
    info: Callable[[SimulatedConfig], EngineInfo],
) -> Callable[[SimulatedConfig], EngineInfo]:
    return lambda config: msgspec.structs.replace(info(config), forces_tokens=False)
