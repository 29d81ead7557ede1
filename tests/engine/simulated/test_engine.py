"""SimulatedEngine: timing by hand, thousands of requests, every fault, drain and health."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence

import pytest

from tests.engine.recorder import Recorder
from vllm_deepinfer.engine import (
    EngineDead,
    EngineUnavailable,
    FinishReason,
    GenerateRequest,
    HealthState,
    Overloaded,
    SamplingParams,
    TokenDelta,
    collect,
)
from vllm_deepinfer.engine.clock import run_virtual
from vllm_deepinfer.engine.simulated import (
    SimulatedConfig,
    SimulatedEngine,
    Speculation,
    hashed_tokens,
    scripted_tokens,
)
from vllm_deepinfer.policy.step_cost import StepCost

COST = StepCost(per_step=0.010, per_token=0.001, per_decode=0.002)


def request_of(name: str, prompt: int = 10, tokens: int = 5, priority: int = 0) -> GenerateRequest:
    ids = [100 + (hash(name) + i) % 1_000 for i in range(prompt)]
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=ids,
        sampling=SamplingParams(max_tokens=tokens),
        priority=priority,
    )


class Timeline:
    """A sink that notes at what time each token came."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self.finals: dict[str, TokenDelta] = {}

    def __call__(self, deltas: Sequence[TokenDelta]) -> None:
        now = asyncio.get_running_loop().time()
        for delta in deltas:
            self.times.setdefault(delta.request_id, []).extend([now] * len(delta.token_ids))
            if delta.final:
                self.finals[delta.request_id] = delta


async def started(**sizes: object) -> SimulatedEngine:
    engine = SimulatedEngine(SimulatedConfig(**{"cost": COST, **sizes}))  # type: ignore[arg-type]
    await engine.start()
    return engine


def test_a_lone_request_takes_what_step_cost_says() -> None:
    async def main() -> list[float]:
        engine, sink = await started(), Timeline()
        await engine.submit(request_of("a", prompt=10, tokens=4), sink)
        await engine.drain()
        await engine.close()
        return sink.times["a"]

    prefill, decode = 0.010 + 10 * 0.001, 0.010 + 0.002
    assert run_virtual(main()) == pytest.approx([prefill + i * decode for i in range(4)])


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    """Chunks of 100 - 1: the decode keeps going, each of its steps as long as the chunk makes it."""

    async def main() -> Timeline:
        engine, sink = await started(max_num_batched_tokens=100, max_num_seqs=8), Timeline()
        await engine.submit(request_of("decode", prompt=1, tokens=10), sink)
        await asyncio.sleep(0.012)
        await engine.submit(request_of("long", prompt=297, tokens=1), sink)
        await engine.drain()
        return sink

    sink = run_virtual(main())
    gaps = [b - a for a, b in zip(sink.times["decode"], sink.times["decode"][1:], strict=False)]
    mixed, alone = 0.010 + 99 * 0.001 + 0.002, 0.012
    assert gaps == pytest.approx([alone] + [mixed] * 3 + [alone] * 5)
    assert sink.times["long"] == pytest.approx([0.011 + alone + 3 * mixed])


def test_speculation_gives_several_tokens_per_step_at_the_stated_rate() -> None:
    async def main() -> tuple[int, int, int]:
        engine = SimulatedEngine(
            SimulatedConfig(cost=COST, speculation=Speculation(draft_tokens=3, acceptance=0.6)),
            rng=random.Random(3),
        )
        await engine.start()
        done = await collect(engine, request_of("a", tokens=4_000))
        return len(done.token_ids), done.accepted_draft_tokens, engine.health().steps

    tokens, accepted, steps = run_virtual(main())
    per_step = 1 + 0.6 + 0.6**2 + 0.6**3
    assert tokens == 4_000
    assert accepted == pytest.approx(tokens - steps, abs=3)  # every step gives one token of its own
    assert tokens / steps == pytest.approx(per_step, rel=0.05)


def test_thousands_of_requests_end_exactly_once_with_their_own_answer() -> None:
    async def main() -> tuple[Recorder, list[GenerateRequest], SimulatedEngine]:
        rng = random.Random(5)
        config = SimulatedConfig(
            cost=COST, kv_capacity_tokens=8_192, max_model_len=512, block_size=16, max_num_seqs=64
        )
        engine, sink = SimulatedEngine(config), Recorder()
        await engine.start()
        requests = [
            request_of(f"r{i}", rng.randint(1, 300), rng.randint(1, 60), rng.randint(0, 2))
            for i in range(3_000)
        ]
        for request in requests:
            await engine.submit(request, sink)
            await asyncio.sleep(rng.expovariate(50))
            if rng.random() < 0.1:
                await engine.abort([request.request_id])
        await engine.drain()
        return sink, requests, engine

    sink, requests, engine = run_virtual(main())
    source = hashed_tokens(engine.config.vocab_size)
    assert len(sink.finals) == 3_000
    assert engine.core.preemptions > 50, "the KV was too small for all, which is the point"
    for request in requests:
        got = sink.tokens[request.request_id]
        assert got == [source(request)(i) for i in range(len(got))]
        if sink.finals[request.request_id].finish_reason is FinishReason.LENGTH:
            assert len(got) == request.sampling.max_tokens
    assert (engine.load().kv_tokens_used, engine.load().active_requests) == (0, 0)


class LateClock:
    """Time that passes only in `sleep`; the third one lasts 0.1 s longer than asked for."""

    def __init__(self) -> None:
        self.time = 0.0
        self.asked: list[float] = []

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.asked.append(seconds)
        self.time += seconds + (0.1 if len(self.asked) == 3 else 0.0)
        await asyncio.sleep(0)


def test_an_engine_does_not_wait_for_a_late_event_loop() -> None:
    """Decode steps take 12 ms: when the loop is 100 ms late, eight are over and a ninth is nearly."""

    async def main() -> list[float]:
        clock = LateClock()
        engine = SimulatedEngine(SimulatedConfig(cost=COST), clock=clock)
        await engine.start()
        await engine.submit(request_of("a", prompt=1, tokens=14), Recorder())
        await engine.drain()
        return clock.asked

    late = run_virtual(main())
    assert late == pytest.approx([0.011, 0.012, 0.012] + [0.0] * 8 + [0.008] + [0.012] * 2)


def test_a_scripted_answer_ends_with_end_of_sequence() -> None:
    async def main() -> None:
        config = SimulatedConfig(cost=COST)
        tokens = scripted_tokens(lambda request: [7, 8, request.prompt_token_ids[0]], config.eos_token_id)
        engine = SimulatedEngine(config, tokens=tokens)
        await engine.start()
        request = GenerateRequest(request_id="a", prompt_token_ids=[55])
        done = await collect(engine, request)
        assert done.token_ids == [7, 8, 55, config.eos_token_id]
        assert (done.finish_reason, done.stop_reason) == (FinishReason.STOP, None)

    run_virtual(main())


def test_the_nth_request_fails_after_the_stated_tokens() -> None:
    async def main() -> None:
        engine, sink = await started(), Recorder()
        engine.faults.fail_requests = {2: 3, 3: 0}
        for name in "abc":
            await engine.submit(request_of(name), sink)
        await engine.drain()
        assert [len(sink.tokens[name]) for name in "abc"] == [5, 3, 0]
        assert [sink.finals[name].finish_reason.value for name in "abc"] == ["length", "error", "error"]  # type: ignore[union-attr]
        assert sink.finals["b"].error == "the simulated engine was told to fail this request."
        assert engine.health().state is HealthState.DRAINING

    run_virtual(main())


def test_a_crash_ends_everything_and_refuses_the_rest() -> None:
    async def main() -> None:
        engine, sink = await started(), Recorder()
        for name in "abc":
            await engine.submit(request_of(name, tokens=50), sink)
        await asyncio.sleep(0.1)
        engine.crash("out of memory")
        assert {final.error for final in sink.finals.values()} == {"out of memory"}
        assert engine.health().state is HealthState.DEAD and engine.health().detail == "out of memory"
        with pytest.raises(EngineDead, match="out of memory"):
            await engine.submit(request_of("d"), sink)
        with pytest.raises(EngineDead):
            await engine.start()
        await asyncio.sleep(1)
        await engine.drain()
        await engine.close()
        assert len(sink.finals) == 3

    run_virtual(main())


def test_a_hang_is_reported_as_wedged_until_it_resumes() -> None:
    async def main() -> None:
        engine, sink = await started(wedge_after_s=2.0), Recorder()
        await asyncio.sleep(60)
        assert engine.health().state is HealthState.READY, "an idle engine is not wedged"
        await engine.submit(request_of("a", tokens=50), sink)
        await engine.submit(request_of("b", tokens=50), sink)
        await asyncio.sleep(0.1)
        before = len(sink.tokens["a"])
        engine.hang()
        await asyncio.sleep(1.9)
        assert engine.health().state is HealthState.READY
        await asyncio.sleep(0.2)
        health = engine.health()
        assert health.state is HealthState.WEDGED and not health.serving
        assert health.detail.startswith("no step has ended for 2.") and health.detail.endswith("2 requests.")
        assert len(sink.tokens["a"]) == before
        await engine.abort(["b"])
        assert sink.finals["b"].finish_reason is FinishReason.ABORT
        engine.resume()
        await sink.ended("a")
        assert len(sink.tokens["a"]) == 50 and engine.health().state is HealthState.READY

    run_virtual(main())


@pytest.mark.parametrize(("slowdown", "stall", "expected"), [(3.0, 0.0, 0.06), (1.0, 0.5, 0.52)])
def test_slow_and_stalled_steps(slowdown: float, stall: float, expected: float) -> None:
    async def main() -> float:
        engine, sink = await started(), Timeline()
        engine.faults.slowdown, engine.faults.stall_s = slowdown, stall
        await engine.submit(request_of("a", prompt=10, tokens=1), sink)
        await engine.drain()
        return sink.times["a"][0]

    assert run_virtual(main()) == pytest.approx(expected)


def test_refusals_on_command_and_when_full() -> None:
    async def main() -> None:
        engine, sink = await started(max_num_seqs=2, max_waiting=1), Recorder()
        engine.faults.refuse = Overloaded("come back later", retry_after_s=7)
        with pytest.raises(Overloaded, match="come back later") as refused:
            await engine.submit(request_of("a"), sink)
        assert refused.value.retry_after_s == 7
        engine.faults.refuse = None
        for name in "abc":
            await engine.submit(request_of(name), sink)
        with pytest.raises(Overloaded, match="2 requests and 1 waiting"):
            await engine.submit(request_of("d"), sink)
        await engine.abort(["b"])
        await engine.submit(request_of("d"), sink)
        await engine.drain()
        assert sorted(sink.finals) == ["a", "b", "c", "d"]

    run_virtual(main())


def test_start_can_fail_and_is_needed() -> None:
    async def main() -> None:
        engine = SimulatedEngine()
        assert engine.health().state is HealthState.STARTING
        with pytest.raises(EngineUnavailable, match="not been started"):
            await engine.submit(request_of("a"), Recorder())
        engine.faults.fail_start = EngineDead("no device")
        with pytest.raises(EngineDead, match="no device"):
            await engine.start()
        assert engine.health().state is HealthState.DEAD
        await engine.close()

    run_virtual(main())


def test_close_ends_what_runs_with_an_error() -> None:
    async def main() -> None:
        engine, sink = await started(), Recorder()
        await engine.submit(request_of("a", tokens=50), sink)
        await asyncio.sleep(0.05)
        await engine.close()
        final = sink.finals["a"]
        assert (final.finish_reason, final.error) == (FinishReason.ERROR, "the engine was closed.")

    run_virtual(main())


def test_priorities_are_served_first_and_preempted_last() -> None:
    async def main() -> list[str]:
        engine, order = await started(max_num_seqs=1), list[str]()

        def sink(deltas: Sequence[TokenDelta]) -> None:
            order.extend(delta.request_id for delta in deltas if delta.final)

        await engine.submit(request_of("running", priority=5), sink)
        await asyncio.sleep(0.021)
        for name, priority in (("low", 2), ("high", 0), ("middle", 1)):
            await engine.submit(request_of(name, priority=priority), sink)
        await engine.drain()
        return order

    assert run_virtual(main()) == ["running", "high", "middle", "low"]


def test_a_failing_token_source_kills_the_engine_with_its_reason() -> None:
    async def main() -> None:
        def source(request: GenerateRequest):  # type: ignore[no-untyped-def]
            if request.request_id != "a":
                return lambda position: 50
            return lambda position: 100 // (2 - position)

        engine, sink = SimulatedEngine(SimulatedConfig(cost=COST), tokens=source), Recorder()
        await engine.start()
        await engine.submit(request_of("ends in the same step", tokens=3), sink)
        await engine.submit(request_of("a"), sink)
        await sink.ended("a")
        assert sink.finals["ends in the same step"].finish_reason is FinishReason.LENGTH
        assert sink.finals["a"].finish_reason is FinishReason.ERROR
        assert "division" in (sink.finals["a"].error or "")
        assert engine.health().state is HealthState.DEAD
        assert not math.isnan(engine.health().idle_s)

    run_virtual(main())
