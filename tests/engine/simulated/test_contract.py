"""SimulatedEngine keeps the contract: roomy, speculating, and so tight that requests preempt each other."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.engine.contract import EngineContract
from vllm_deepinfer.engine.simulated import SimulatedConfig, SimulatedEngine, Speculation
from vllm_deepinfer.policy.step_cost import StepCost

FAST = StepCost(
    per_step=1e-3, per_token=1e-6
)  # real time: these tests also prove the engine on an ordinary loop

CONFIGS = {
    "roomy": SimulatedConfig(cost=FAST, max_model_len=512, block_size=16, kv_capacity_tokens=65_536),
    "speculating": SimulatedConfig(
        cost=FAST,
        max_model_len=512,
        block_size=16,
        kv_capacity_tokens=65_536,
        speculation=Speculation(draft_tokens=2, acceptance=0.3),
    ),
    "tight": SimulatedConfig(
        cost=FAST,
        max_model_len=256,
        block_size=8,
        kv_capacity_tokens=512,
        max_num_seqs=16,
        max_num_batched_tokens=24,
    ),
}


class TestSimulatedEngine(EngineContract):
    @pytest.fixture(params=CONFIGS)
    async def engine(self, request: pytest.FixtureRequest) -> AsyncIterator[SimulatedEngine]:
        engine = SimulatedEngine(CONFIGS[request.param])
        await engine.start()
        yield engine
        await engine.close()
