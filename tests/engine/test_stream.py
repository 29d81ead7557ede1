"""The generator for simple callers: order, early exit, errors."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from vllm_deepinfer.engine import (
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    SamplingParams,
    collect,
    stream,
)
from vllm_deepinfer.engine.clock import run_virtual
from vllm_deepinfer.engine.simulated import SimulatedConfig, SimulatedEngine, Speculation


def request_of(name: str = "r", **sampling: object) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 6, **sampling})  # type: ignore[arg-type]
    return GenerateRequest(request_id=name, prompt_token_ids=[20, 21, 22], sampling=params)


async def started(**sizes: object) -> SimulatedEngine:
    engine = SimulatedEngine(SimulatedConfig(**sizes))  # type: ignore[arg-type]
    await engine.start()
    return engine


def test_stream_and_collect_agree() -> None:
    async def main() -> None:
        engine = await started(speculation=Speculation(draft_tokens=2, acceptance=0.9))
        deltas = [delta async for delta in stream(engine, request_of(logprobs=1))]
        done = await collect(engine, request_of(logprobs=1))
        assert [delta.final for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        assert done.token_ids == [token for delta in deltas for token in delta.token_ids]
        assert done.logprobs is not None and len(done.logprobs) == 6
        assert 0 < done.accepted_draft_tokens < 6
        assert (done.finish_reason, done.error) == (FinishReason.LENGTH, None)

    run_virtual(main())


def test_a_slow_reader_loses_nothing() -> None:
    async def main() -> list[int]:
        engine, got = await started(), list[int]()
        async for delta in stream(engine, request_of(max_tokens=20)):
            got += delta.token_ids
            await asyncio.sleep(10)
        return got

    async def fast() -> list[int]:
        return (await collect(await started(), request_of(max_tokens=20))).token_ids

    assert run_virtual(main()) == run_virtual(fast())


def test_leaving_early_aborts() -> None:
    async def main() -> None:
        engine = await started()
        async with contextlib.aclosing(stream(engine, request_of(max_tokens=100))) as deltas:
            async for _ in deltas:
                break
        assert engine.load().active_requests == 0

    run_virtual(main())


def test_a_cancelled_reader_aborts() -> None:
    async def main() -> None:
        engine = await started()
        task = asyncio.ensure_future(collect(engine, request_of(max_tokens=1_000)))
        await asyncio.sleep(1)
        assert engine.load().active_requests == 1
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert engine.load().active_requests == 0

    run_virtual(main())


def test_refusals_are_raised_and_failures_are_told() -> None:
    async def main() -> None:
        engine = await started()
        with pytest.raises(InvalidRequest):
            await collect(engine, request_of(logprobs=99))
        engine.faults.fail_requests = {1: 2}
        done = await collect(engine, request_of())
        assert (len(done.token_ids), done.finish_reason) == (2, FinishReason.ERROR)
        assert done.error

    run_virtual(main())
