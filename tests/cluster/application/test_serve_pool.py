"""A pool behind Serve: the contract, and no token lost or doubled whatever happens to replicas and calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from ray.exceptions import ActorUnavailableError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError

from tests.cluster.application.fake_serve import CONFIG, DEPLOYMENT, FakeServe
from tests.cluster.application.pools import check_all, pool_on, serving, wanted
from tests.engine.contract import EngineContract
from tests.engine.recorder import Recorder, eventually, request_of
from vllm_deepinfer.cluster.application.serve_pool import ServePool
from vllm_deepinfer.engine import (
    Engine,
    EngineDead,
    EngineUnavailable,
    FinishReason,
    GenerateRequest,
    HealthState,
    Overloaded,
    collect,
)


def where(pool: ServePool, request: GenerateRequest) -> str:
    return str(pool._live[request.request_id].worker)


class TestServePool(EngineContract):
    @pytest.fixture(params=[1, 3])
    async def engine(self, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
        async with serving(request.param) as (pool, serve):
            yield pool
            await eventually(lambda: all(one.ongoing == 0 for one in serve.replicas.values()))
            for replica in serve.replicas.values():
                assert replica.engine.load().active_requests == 0
                assert not replica.server.leases._living and not replica.server.leases._keys

    async def test_one_call_serves_all_streams_of_a_step(self, engine: Engine) -> None:
        """Per replica; the pool of one is as the engine itself."""
        if len(engine._workers) == 1:  # type: ignore[attr-defined]
            await super().test_one_call_serves_all_streams_of_a_step(engine)

    async def test_health_shows_progress(self, engine: Engine) -> None:
        """Steps come with the replica's next sign of life."""
        before = engine.health()
        await collect(engine, request_of([30] * 9))
        await eventually(lambda: engine.health().steps > before.steps)
        assert engine.health().state is HealthState.READY


# Replicas that die


async def test_a_death_after_some_tokens_is_not_seen_by_the_caller() -> None:
    async with serving(2) as (pool, serve):
        sink = Recorder()
        requests = [request_of([30 + at] * 20, max_tokens=200) for at in range(8)]
        for request in requests:
            await pool.submit(request, sink)
        await sink.started(requests[0].request_id, 20)
        name = where(pool, requests[0])
        await serve.replicas[name].kill()
        await sink.ended(*(request.request_id for request in requests))
        check_all(sink, requests)
        assert pool.counts["continued"] > 0 and pool.counts["calls_lost"] == 1
        assert name not in pool._workers and name not in pool.view.members


async def test_the_only_replica_dies_and_its_successor_ends_what_it_began() -> None:
    async with serving(1) as (pool, serve):
        sink, request = Recorder(), request_of([30] * 20, max_tokens=200)
        await pool.submit(request, sink)
        await sink.started(request.request_id, 20)
        await serve.replicas[where(pool, request)].kill()
        assert await asyncio.wait_for(asyncio.shield(asyncio.sleep(0.05, True)), 1)
        serve.list()
        late = request_of([31] * 20)
        waiting = asyncio.ensure_future(pool.submit(late, sink))  # comes while nobody is there
        await asyncio.sleep(0.05)
        await serve.add()
        await sink.ended(request.request_id)
        await waiting
        await sink.ended(late.request_id)
        check_all(sink, [request, late])


async def test_a_death_that_no_call_reports_is_seen_by_the_silence() -> None:
    async with serving(2) as (pool, serve):
        sink, request = Recorder(), request_of([30] * 20, max_tokens=300)
        await pool.submit(request, sink)
        await sink.started(request.request_id, 20)
        await serve.replicas[where(pool, request)].kill(silently=True)
        await sink.ended(request.request_id)
        check_all(sink, [request])
        assert pool.counts["calls_lost"] == 0 and pool.counts["continued"] == 1


async def test_an_engine_that_crashes_in_a_process_that_lives_is_a_loss_as_well() -> None:
    """Its errors come before the replica's next word on its health."""
    async with serving(2) as (pool, serve):
        sink = Recorder()
        requests = [request_of([30 + at] * 20, max_tokens=200) for at in range(6)]
        for request in requests:
            await pool.submit(request, sink)
        await sink.started(requests[0].request_id, 20)
        crashed = serve.replicas[where(pool, requests[0])]
        crashed.engine.crash()
        await sink.ended(*(request.request_id for request in requests))
        check_all(sink, requests)
        assert pool.counts["continued"] > 0 and pool.counts["not_continued"] == 0


async def test_a_death_between_the_routing_and_the_acceptance_routes_again() -> None:
    async with serving(2) as (pool, serve):
        sink, request = Recorder(), request_of([30] * 20)
        handle = serve.handles[0]
        assert handle.router is not None
        routed = handle.router.on_request_routed
        killed: list[asyncio.Future[None]] = []

        def kill_then_tell(pending, replica_id, result):  # type: ignore[no-untyped-def]
            if not killed:
                killed.append(asyncio.ensure_future(serve.replicas[replica_id.unique_id].kill()))
            routed(pending, replica_id, result)

        handle.router.on_request_routed = kill_then_tell  # type: ignore[method-assign]
        await asyncio.wait_for(pool.submit(request, sink), 5)
        await sink.ended(request.request_id)
        check_all(sink, [request])
        assert killed and len(pool._workers) == 1


async def test_a_replica_that_stands_still_while_it_is_asked_is_passed_over() -> None:
    """Serve waits for its answer for ever; the channel's silence tells us sooner."""
    async with serving(2) as (pool, serve):
        sink, first = Recorder(), request_of([30] * 20)
        for replica in serve.replicas.values():
            replica.mute = True
        waiting = asyncio.ensure_future(pool.submit(first, sink))
        await eventually(lambda: bool(pool.view._assigned))
        ((name, _),) = pool.view._assigned.values()
        for replica in serve.replicas.values():
            if replica.name != name:
                replica.mute = False
        await serve.replicas[name].kill(silently=True)
        await asyncio.wait_for(waiting, 8)
        await sink.ended(first.request_id)
        check_all(sink, [first])


async def test_a_wedged_engine_s_requests_move_and_nothing_more_goes_there() -> None:
    config = replace(CONFIG, wedge_after_s=0.15)
    async with serving(2, config) as (pool, serve):
        sink, request = Recorder(), request_of([30] * 20, max_tokens=300)
        await pool.submit(request, sink)
        await sink.started(request.request_id, 20)
        name = where(pool, request)
        serve.replicas[name].engine.hang()
        await sink.ended(request.request_id)
        taken = serve.replicas[name].engine._accepted
        await eventually(lambda: name not in pool.view.members or not pool.view._ready(name))
        later = [request_of([40 + at] * 5) for at in range(8)]
        for one in later:
            await pool.submit(one, sink)
        await sink.ended(*(one.request_id for one in later))
        check_all(sink, [request, *later])
        wedged = serve.replicas[name]
        assert wedged.engine._accepted == taken and wedged.engine.load().active_requests == 0
        # Without work it would look well. It is wedged until it has shown otherwise.
        assert wedged.engine.health().state is HealthState.READY
        assert wedged.server.health().state is HealthState.WEDGED


async def test_a_replica_that_was_out_of_reach_is_used_again() -> None:
    """A call fails with ActorUnavailable, the replica lives on and Serve goes on listing it."""
    async with serving(1) as (pool, serve):
        (replica,) = serve.replicas.values()
        replica.error = ActorUnavailableError("rpc failed", None)
        sink, request = Recorder(), request_of([30] * 20, max_tokens=300)
        await pool.submit(request, sink)
        await sink.started(request.request_id, 20)
        replica.died.set()
        await eventually(lambda: not pool._workers)
        replica.died.clear()
        await eventually(lambda: replica.engine.load().active_requests == 0)  # the old attempt is aborted
        await sink.ended(request.request_id)
        check_all(sink, [request])
        assert list(pool._workers) == [replica.name] and list(pool.view.members) == [replica.name]


async def test_a_lease_that_fails_by_itself_harms_nothing() -> None:
    async with serving(1) as (pool, serve):
        (replica,) = serve.replicas.values()
        replica.error = RayTaskError("lease", "Traceback", ValueError("a bug"))
        sink, request = Recorder(), request_of([30] * 20, max_tokens=200)
        await pool.submit(request, sink)
        await sink.started(request.request_id, 20)
        replica.died.set()
        await eventually(lambda: not pool._leases)
        replica.died.clear()
        await sink.ended(request.request_id)
        check_all(sink, [request])
        assert (pool.counts["calls_failed"], pool.counts["continued"]) == (1, 0)


async def test_a_call_that_fails_after_the_answer_s_end_is_nobody_s_loss() -> None:
    async with serving(1) as (pool, serve):
        (replica,) = serve.replicas.values()
        done = await collect(pool, request_of([30] * 20))
        assert done.finish_reason is FinishReason.LENGTH
        await replica.kill()
        await eventually(lambda: not pool._leases)
        assert pool.counts["rerouted"] == pool.counts["continued"] == pool.counts["not_continued"] == 0


# Replicas that refuse


async def test_one_replica_that_is_full_says_so_once_and_is_asked_again_later() -> None:
    async with serving(1) as (pool, serve):
        (replica,) = serve.replicas.values()
        replica.engine.faults.refuse = Overloaded("full", 2.0)
        with pytest.raises(Overloaded, match="full") as caught:
            await asyncio.wait_for(pool.submit(request_of([30] * 20), Recorder()), 5)
        assert caught.value.retry_after_s == 2.0
        replica.engine.faults.refuse = None
        assert len((await collect(pool, request_of([30] * 20))).token_ids) == 16


async def test_a_refusal_tries_the_next_and_the_last_refusal_is_told() -> None:
    async with serving(3) as (pool, serve):
        first, second, third = serve.replicas.values()
        first.engine.faults.refuse = Overloaded("full", 3.0)
        second.engine.faults.refuse = EngineUnavailable("on strike")
        for _ in range(3):
            assert (await collect(pool, request_of([30] * 20))).token_ids
        third.engine.faults.refuse = Overloaded("full too", 1.0)
        with pytest.raises(Overloaded) as caught:
            await asyncio.wait_for(pool.submit(request_of([30] * 20), Recorder()), 5)
        assert caught.value.retry_after_s == 1.0


async def test_a_replica_that_serve_finds_full_makes_the_request_wait() -> None:
    async with serving(1) as (pool, serve):
        (replica,) = serve.replicas.values()
        replica.full = True
        sink, request = Recorder(), request_of([30] * 20)
        waiting = asyncio.ensure_future(pool.submit(request, sink))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        replica.full = False
        await waiting
        await sink.ended(request.request_id)
        check_all(sink, [request])


async def test_patience_ends_with_one_sentence() -> None:
    async with serving(1, room_s=0.2) as (pool, serve):
        next(iter(serve.replicas.values())).full = True
        with pytest.raises(Overloaded, match=r"no replica of pool .* had room for 0\.2 s\."):
            await pool.submit(request_of([30] * 20), Recorder())


async def test_one_whose_replica_was_lost_has_a_patience_of_its_own() -> None:
    async with serving(1, room_s=0.05, patience_s=5.0) as (pool, serve):
        sink, request = Recorder(), request_of([30] * 20, max_tokens=200)
        await pool.submit(request, sink)
        await sink.started(request.request_id, 20)
        await serve.replicas[where(pool, request)].kill()
        serve.list()
        await asyncio.sleep(0.3)  # longer than a new request would wait for room
        await serve.add()
        await sink.ended(request.request_id)
        check_all(sink, [request])


async def test_too_many_waiting_is_an_overload() -> None:
    async with serving(1) as (pool, serve):
        next(iter(serve.replicas.values())).full = True
        serve.most_queued = 1
        waiting = asyncio.ensure_future(pool.submit(request_of([30] * 20), Recorder()))
        await asyncio.sleep(0.05)
        with pytest.raises(Overloaded, match="as many requests waiting as it may"):
            await pool.submit(request_of([30] * 20), Recorder())
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting


async def test_a_deployment_that_failed_is_said_at_once() -> None:
    async with serving(1) as (pool, serve):
        serve.handles[0].failing = DeploymentUnavailableError(DEPLOYMENT)
        with pytest.raises(EngineDead, match="has failed, and Ray Serve does not restart it"):
            await asyncio.wait_for(pool.submit(request_of([30] * 20), Recorder()), 2)


async def test_a_request_that_fills_the_context_has_room_in_an_idle_replica() -> None:
    """What is reserved for its output must not exceed what can come."""
    config = replace(CONFIG, kv_capacity_tokens=512)
    async with serving(1, config) as (pool, _):
        request = request_of([30] * 500, max_tokens=None)
        assert len((await asyncio.wait_for(collect(pool, request), 5)).token_ids) == 12


# Aborts and cancels


async def test_an_abort_while_serve_looks_for_a_replica() -> None:
    async with serving(1) as (pool, serve):
        (replica,) = serve.replicas.values()
        replica.full = True
        sink, request = Recorder(), request_of([30] * 20)
        waiting = asyncio.ensure_future(pool.submit(request, sink))
        await asyncio.sleep(0.05)
        await pool.abort([request.request_id])
        await asyncio.wait_for(waiting, 5)
        assert sink.finals[request.request_id].finish_reason is FinishReason.ABORT
        replica.full = False
        await asyncio.sleep(0.05)
        assert replica.ongoing == 0 and replica.engine.load().active_requests == 0 and not pool._live


@pytest.mark.parametrize("ticks", range(12))
async def test_an_abort_at_any_moment_of_the_placing(ticks: int) -> None:
    async with serving(1) as (pool, serve):
        sink, request = Recorder(), request_of([30] * 20, max_tokens=400)
        placing = asyncio.ensure_future(pool.submit(request, sink))
        for _ in range(ticks):
            await asyncio.sleep(0)
        if not pool._live:
            await asyncio.sleep(0)
        await pool.abort([request.request_id])
        await asyncio.wait_for(placing, 5)
        assert sink.finals[request.request_id].finish_reason is FinishReason.ABORT
        (replica,) = serve.replicas.values()
        await eventually(lambda: replica.ongoing == 0 and replica.engine.load().active_requests == 0)


@pytest.mark.parametrize("ticks", range(12))
async def test_a_cancel_at_any_moment_of_the_placing(ticks: int) -> None:
    async with serving(1) as (pool, serve):
        sink, request = Recorder(), request_of([30] * 20, max_tokens=20)
        placing = asyncio.ensure_future(pool.submit(request, sink))
        for _ in range(ticks):
            await asyncio.sleep(0)
        placing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await placing
        (replica,) = serve.replicas.values()
        await eventually(lambda: replica.ongoing == 0 and replica.engine.load().active_requests == 0)
        await eventually(lambda: not pool._live and not pool._leases)
        assert sink.calls == [] or request.request_id in sink.finals
        assert len((await collect(pool, request_of([30] * 20))).token_ids) == 16


async def test_an_abort_while_the_request_looks_for_a_successor() -> None:
    async with serving(1) as (pool, serve):
        sink, request = Recorder(), request_of([30] * 20, max_tokens=400)
        await pool.submit(request, sink)
        await sink.started(request.request_id, 10)
        await serve.replicas[where(pool, request)].kill()
        await eventually(lambda: pool.counts["continued"] == 1)
        await pool.abort([request.request_id])
        final = sink.finals[request.request_id]
        tokens = sink.tokens[request.request_id]
        assert final.finish_reason is FinishReason.ABORT and tokens == wanted(request)[: len(tokens)]
        successor = await serve.add()
        assert len((await collect(pool, request_of([30] * 20))).token_ids) == 16
        assert successor.engine.load().active_requests == 0


# Replicas that come and go


async def test_a_retired_replica_ends_what_it_has_and_gets_nothing_more() -> None:
    async with serving(2) as (pool, serve):
        sink = Recorder()
        running = [request_of([30 + at] * 20, max_tokens=300) for at in range(6)]
        for request in running:
            await pool.submit(request, sink)
        name = where(pool, running[0])
        retiring = asyncio.ensure_future(serve.retire(name))
        later = [request_of([50 + at] * 20) for at in range(6)]
        for request in later:
            await pool.submit(request, sink)
            assert where(pool, request) != name
        await asyncio.wait_for(retiring, 20)
        await sink.ended(*(request.request_id for request in (*running, *later)))
        check_all(sink, [*running, *later])
        assert pool.counts["continued"] == pool.counts["rerouted"] == 0
        await eventually(lambda: name not in pool._workers)


async def test_a_replica_that_is_listed_again_is_used_again() -> None:
    """A controller that restarts may forget replicas for a moment."""
    async with serving(2) as (pool, serve):
        sink, names = Recorder(), list(serve.listed)
        request = request_of([30] * 20, max_tokens=400)
        await pool.submit(request, sink)
        serve.list()
        assert not pool.view.members
        await asyncio.sleep(0.1)
        serve.list(*names)
        await eventually(lambda: set(pool.view.members) == set(names))
        later = request_of([31] * 20)
        await pool.submit(later, sink)
        await sink.ended(request.request_id, later.request_id)
        check_all(sink, [request, later])


async def test_scaled_to_zero_and_back() -> None:
    async with serving(1, may_be_empty=True) as (pool, serve):
        (name,) = serve.listed
        info = pool.info
        await serve.retire(name)
        await eventually(lambda: not pool._workers)
        assert pool.info == info and pool.health().state is HealthState.READY
        sink, request = Recorder(), request_of([30] * 20)
        waiting = asyncio.ensure_future(pool.submit(request, sink))
        await asyncio.sleep(0.05)
        assert serve.handles[0].waiting == 1, "Serve sees it wait, and scales by that"
        await serve.add()
        await waiting
        await sink.ended(request.request_id)
        check_all(sink, [request])


async def test_a_gateway_that_starts_while_the_pool_is_at_zero_wakes_it() -> None:
    """It could not say what it serves, and no request would come to wake the pool."""
    serve = FakeServe()
    pool = pool_on(serve, may_be_empty=True)
    starting = asyncio.ensure_future(pool.start())
    await eventually(lambda: bool(serve.handles) and serve.handles[0].waiting == 1)
    replica = await serve.add()
    await asyncio.wait_for(starting, 5)
    assert pool.info.max_model_len == CONFIG.max_model_len
    await eventually(lambda: replica.ongoing == 0 and serve.handles[0].waiting == 0)
    assert len((await collect(pool, request_of([30] * 20))).token_ids) == 16
    await pool.close()
    await serve.close()


async def test_a_pool_that_may_not_be_empty_is_dead_without_replicas() -> None:
    async with serving(1) as (pool, serve):
        await serve.retire(serve.listed[0])
        await eventually(lambda: not pool._workers)
        assert pool.health().state is HealthState.DEAD


async def test_without_any_replica_the_start_fails() -> None:
    serve = FakeServe()
    pool = pool_on(serve, start_s=0.1)
    with pytest.raises(EngineDead, match=r"no replica of pool .* answered within 0\.1 s"):
        await pool.start()
    assert not pool._joins


async def test_a_replica_of_another_model_is_not_used_and_tried_again_only_now_and_then() -> None:
    other = replace(CONFIG, max_model_len=256)
    async with serving(1) as (pool, serve):
        await serve.add(other)
        await eventually(lambda: pool.counts["not_joined"] == 1)
        await asyncio.sleep(0.2)
        assert pool.counts["not_joined"] == 1 and len(pool.view.members) == 1


async def test_closing_ends_what_runs_and_what_waits() -> None:
    async with serving(1) as (pool, serve):
        sink, running, waits = Recorder(), request_of([30] * 20, max_tokens=400), request_of([31] * 20)
        await pool.submit(running, sink)
        (replica,) = serve.replicas.values()
        replica.full = True
        waiting = asyncio.ensure_future(pool.submit(waits, sink))
        await asyncio.sleep(0.05)
        await pool.close()
        with contextlib.suppress(EngineUnavailable):
            await asyncio.wait_for(waiting, 5)
        assert sink.finals[running.request_id].finish_reason is FinishReason.ERROR
        await eventually(lambda: replica.ongoing == 0 and replica.engine.load().active_requests == 0)
