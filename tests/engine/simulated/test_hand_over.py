"""Hand-over between simulated engines, in virtual time: durations, capacity, leases, quarantine, faults."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.recorder import Recorder, fetching_from, keeping, request_of
from vllm_deepinfer.engine import FinishReason, collect
from vllm_deepinfer.engine.clock import run_virtual
from vllm_deepinfer.engine.simulated import SimulatedConfig, SimulatedEngine
from vllm_deepinfer.policy.step_cost import StepCost

CONFIG = SimulatedConfig(
    cost=StepCost(per_step=0.01, per_token=0.001),
    max_model_len=256,
    block_size=16,
    kv_capacity_tokens=512,
    transfer_s_per_token=0.1,
    transfer_latency_s=1.0,
    fetch_timeout_s=100.0,
)


async def engine_of(**changes: Any) -> SimulatedEngine:
    engine = SimulatedEngine(replace(CONFIG, **changes))
    await engine.start()
    return engine


async def kept(engine: SimulatedEngine, prompt: list[int]) -> tuple[str, dict[str, Any]]:
    sink, request = Recorder(), keeping(prompt)
    await engine.submit(request, sink)
    await sink.ended(request.request_id)
    source = sink.finals[request.request_id].kv_source
    assert source is not None
    return request.request_id, source


def virtual(main: Coroutine[Any, Any, None]) -> None:
    run_virtual(main)


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(("length", "cached", "seconds"), [(41, 0, 5.0), (41, 32, 1.8), (1, 0, 0.0)])
def test_a_fetch_takes_its_time_and_only_for_what_is_missing(
    length: int, cached: int, seconds: float
) -> None:
    async def main() -> None:
        prefill, decode = await engine_of(), await engine_of()
        prompt = list(range(30, 30 + length))
        if cached:
            await collect(decode, request_of(prompt[:cached], max_tokens=1))
        _, source = await kept(prefill, prompt)
        began = now()
        done = await collect(decode, fetching_from(source, request_of(prompt, max_tokens=1)))
        assert done.cached_tokens == cached
        assert now() - began == pytest.approx(seconds + (0.010 if length > 1 else 0.011))
        assert decode.counts["fetched"] == (length > 1)
        assert prefill.load().held_requests == (length == 1), "nothing was fetched of one token"

    virtual(main())


def test_a_hold_ends_with_its_lease() -> None:
    async def main() -> None:
        engine = await engine_of(hold_lease_s=7.0)
        await kept(engine, [30] * 40)
        await asyncio.sleep(6.9)
        assert (engine.load().held_requests, engine.load().kv_tokens_used) == (1, 48)
        await asyncio.sleep(0.2)
        assert (engine.load().held_requests, engine.load().kv_tokens_used) == (0, 0)
        assert +engine.counts == {"expired": 1}

    virtual(main())


def test_holds_take_capacity_and_what_waits_goes_on_when_they_end() -> None:
    async def main() -> None:
        engine = await engine_of()
        holds = [(await kept(engine, [30 + at] * 250))[0] for at in range(2)]
        sink, request = Recorder(), request_of([40] * 40)
        await engine.submit(request, sink)
        await asyncio.sleep(30)
        assert not sink.calls and engine.load().kv_tokens_free == 0
        await engine.abort(holds[:1])
        await sink.ended(request.request_id)
        assert now() < 35 and engine.counts["released"] == 1

    virtual(main())


def test_one_that_fetches_has_kv_and_takes_no_step() -> None:
    async def main() -> None:
        prefill, decode = await engine_of(), await engine_of()
        _, source = await kept(prefill, [30] * 100)
        sink, request = Recorder(), fetching_from(source, request_of([30] * 100))
        await decode.submit(request, sink)
        await asyncio.sleep(1)
        load = decode.load()
        assert (load.running_requests, load.waiting_requests, load.kv_tokens_used) == (1, 0, 112)
        other = await collect(decode, request_of([50] * 10))
        assert len(other.token_ids) == 16 and now() < 2, "others are served meanwhile"
        await sink.ended(request.request_id)
        assert prefill.load().held_requests == 0

    virtual(main())


def test_blocks_of_an_aborted_fetch_are_free_when_it_has_ended() -> None:
    async def main() -> None:
        prefill, decode = await engine_of(), await engine_of()
        _, source = await kept(prefill, [30] * 100)
        sink, request = Recorder(), fetching_from(source, request_of([30] * 100))
        await decode.submit(request, sink)
        await asyncio.sleep(2)
        await decode.abort([request.request_id])
        assert sink.finals[request.request_id].finish_reason is FinishReason.ABORT
        assert (decode.load().active_requests, decode.load().kv_tokens_used) == (0, 112)
        await asyncio.sleep(10)
        assert decode.load().kv_tokens_used == 0 and not +decode.counts

    virtual(main())


@pytest.mark.parametrize("fault", ["told", "late", "dead", "released"])
def test_a_fetch_that_brings_nothing_is_computed(fault: str) -> None:
    async def main() -> None:
        prefill, decode = await engine_of(), await engine_of()
        prompt = [30] * 100
        hold, source = await kept(prefill, prompt)
        sink, request = Recorder(), fetching_from(source, request_of(prompt))
        if fault == "told":
            decode.faults.fail_fetches = 1
        elif fault == "late":
            decode.faults.stall_fetches_s = 95.0
        await decode.submit(request, sink)
        await asyncio.sleep(1)
        if fault == "dead":
            prefill.crash()
        elif fault == "released":
            await prefill.abort([hold])
        await sink.ended(request.request_id)
        assert +decode.counts == {"recomputed": 1}
        assert (100 < now() < 102) == (fault == "late"), "given up at the deadline"
        assert sink.tokens[request.request_id] == (await collect(decode, request_of(prompt))).token_ids

    virtual(main())


def test_a_foreign_layout_is_not_tried() -> None:
    async def main() -> None:
        prefill, decode = await engine_of(kv_layout="other"), await engine_of()
        _, source = await kept(prefill, [30] * 100)
        began = now()
        await collect(decode, fetching_from(source, request_of([30] * 100, max_tokens=1)))
        assert +decode.counts == {"foreign": 1} and now() - began < 1
        assert prefill.load().held_requests == 1

    virtual(main())


def test_an_id_that_is_held_is_in_use() -> None:
    async def main() -> None:
        engine = await engine_of()
        hold, _ = await kept(engine, [30] * 10)
        with pytest.raises(ValueError, match="in use"):
            await engine.submit(request_of([30], hold), Recorder())
        await engine.abort([hold])
        await collect(engine, request_of([30], hold))

    virtual(main())
