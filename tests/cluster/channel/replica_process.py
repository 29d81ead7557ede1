"""A replica in a process of its own, on the address given: prints the real one, serves until it is killed."""

from __future__ import annotations

import asyncio
import sys

from vllm_deepinfer.cluster.channel import EngineServer
from vllm_deepinfer.engine.simulated import SimulatedConfig, SimulatedEngine
from vllm_deepinfer.policy.step_cost import StepCost

CONFIG = SimulatedConfig(
    cost=StepCost(per_step=5e-3, per_token=1e-6), max_model_len=4096, block_size=16, kv_capacity_tokens=65_536
)


async def main(address: str) -> None:
    engine = SimulatedEngine(CONFIG)
    await engine.start()
    print(await EngineServer(engine, address).start(), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
