"""SimulatedEngine under every interleaving of submit, abort, time, hang, crash and drain (state machine).

The model is what invariants 1, 2 and 4 of the protocol say; the answer of each request is known beforehand.
Covers the class of bugs in which an abort meets a finished request (vLLM #25067) and KV blocks leak (vLLM
#46283).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from tests.engine.recorder import Recorder
from vllm_deepinfer.engine import (
    EngineDead,
    EngineDraining,
    FinishReason,
    GenerateRequest,
    HealthState,
    SamplingParams,
)
from vllm_deepinfer.engine.clock import VirtualTimeLoop
from vllm_deepinfer.engine.simulated import SimulatedConfig, SimulatedEngine, Speculation, hashed_tokens
from vllm_deepinfer.policy.step_cost import StepCost

T = TypeVar("T")
VOCAB_SIZE = 512
ANSWERS = hashed_tokens(VOCAB_SIZE)
CONFIG = SimulatedConfig(
    cost=StepCost(per_step=0.01, per_token=0.001),
    max_model_len=64,
    block_size=4,
    kv_capacity_tokens=96,  # three long requests preempt each other
    max_num_seqs=6,
    max_num_batched_tokens=16,
    speculation=Speculation(draft_tokens=3, acceptance=0.5),
    vocab_size=VOCAB_SIZE,
    wedge_after_s=5.0,
)


class EngineStates(RuleBasedStateMachine):
    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.engine = self.run(self._started())
        self.sinks = [Recorder(), Recorder()]
        self.sink_of: dict[str, Recorder] = {}
        self.sent: dict[str, GenerateRequest] = {}
        self.aborted: set[str] = set()
        self.hung = False

    async def _started(self) -> SimulatedEngine:
        engine = SimulatedEngine(CONFIG, tokens=ANSWERS, rng=random.Random(7))
        await engine.start()
        return engine

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    @property
    def state(self) -> HealthState:
        return self.engine.health().state

    def alive(self) -> set[str]:
        return {name for name in self.sent if name not in self.sink_of[name].finals}

    @rule(
        target=requests,
        prefix=st.sampled_from([(), (20,) * 8, (30,) * 17]),
        length=st.integers(1, 20),
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
        sink=st.integers(0, 1),
        fails=st.booleans(),
    )
    def submit(
        self, prefix: tuple[int, ...], length: int, max_tokens: int, priority: int, sink: int, fails: bool
    ) -> str:
        name = f"r{len(self.sent)}"
        request = GenerateRequest(
            request_id=name,
            prompt_token_ids=[*prefix, *range(100, 100 + length)],
            sampling=SamplingParams(max_tokens=max_tokens),
            priority=priority,
        )
        if self.state is HealthState.DEAD or self.state is HealthState.DRAINING or self.engine._detail:
            with pytest.raises((EngineDead, EngineDraining)):
                self.run(self.engine.submit(request, self.sinks[sink]))
            return name
        if fails:
            self.engine.faults.fail_requests[len(self.sent) + 1] = max_tokens // 2
        self.sent[name], self.sink_of[name] = request, self.sinks[sink]
        self.run(self.engine.submit(request, self.sinks[sink]))
        return name

    @rule(name=requests, again=st.booleans())
    def abort(self, name: str, again: bool) -> None:
        async def abort() -> None:
            if name in self.alive():
                self.aborted.add(name)
            await self.engine.abort([name, "unknown", name] if again else [name])

        self.run(abort())
        if name in self.sent:
            assert name in self.sink_of[name].finals, "ended when abort returns"

    @rule(seconds=st.sampled_from([0.0, 0.011, 0.1, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @rule(factor=st.sampled_from([1.0, 3.0]), stall=st.sampled_from([0.0, 0.5]))
    def slow(self, factor: float, stall: float) -> None:
        self.engine.faults.slowdown, self.engine.faults.stall_s = factor, stall

    @rule()
    def hang_for_long(self) -> None:
        self.engine.hang()
        self.run(asyncio.sleep(CONFIG.wedge_after_s + 1))
        if self.alive():
            assert self.state is HealthState.WEDGED
            assert "no step has ended" in self.engine.health().detail
            steps = self.engine.health().steps
            self.run(asyncio.sleep(1))
            assert self.engine.health().steps == steps, "a hung engine does not step"
        self.engine.resume()

    @precondition(lambda self: len(self.sent) > 8)
    @rule()
    def drain(self) -> None:
        dead = self.state is HealthState.DEAD
        self.run(asyncio.wait_for(self.engine.drain(), 60))
        assert not self.alive()
        assert self.state is (HealthState.DEAD if dead else HealthState.DRAINING)

    @precondition(lambda self: len(self.sent) > 5)
    @rule()
    def crash(self) -> None:
        self.engine.crash("crashed on purpose")
        assert not self.alive()

    @invariant()
    def books_balance(self) -> None:
        load, alive = self.engine.load(), self.alive()
        assert load.active_requests == len(alive)
        assert load.kv_tokens_used + load.kv_tokens_free == CONFIG.kv_capacity_tokens
        fresh = [self.sent[name] for name in alive if not self.sink_of[name].tokens.get(name)]
        assert load.queued_prompt_tokens == sum(len(request.prompt_token_ids) for request in fresh)
        if not alive:
            assert load.kv_tokens_used == 0, "no block leaks"

    @invariant()
    def answers_are_right(self) -> None:
        for name, request in self.sent.items():
            sink = self.sink_of[name]
            got = sink.tokens.get(name, [])
            answer = ANSWERS(request)
            assert got == [answer(i) for i in range(len(got))]
            final = sink.finals.get(name)
            if final is None:
                continue
            if name in self.aborted:
                assert final.finish_reason is FinishReason.ABORT
            elif final.finish_reason is FinishReason.LENGTH:
                assert len(got) == request.sampling.max_tokens
            else:
                assert final.finish_reason is FinishReason.ERROR and final.error

    def teardown(self) -> None:
        self.run(self.engine.close())
        assert not self.alive()
        assert self.engine.load().kv_tokens_used == 0
        self.loop.close()


TestEngineStates = EngineStates.TestCase
TestEngineStates.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
