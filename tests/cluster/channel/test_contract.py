"""An engine on the other end of the channel keeps every promise of the Engine protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.engine.contract import EngineContract
from vllm_deepinfer.cluster.channel import ChannelKeys, EngineServer, RemoteEngine
from vllm_deepinfer.engine.simulated import SimulatedConfig, SimulatedEngine
from vllm_deepinfer.policy.step_cost import StepCost

CONFIG = SimulatedConfig(
    cost=StepCost(per_step=1e-3, per_token=1e-6), max_model_len=512, block_size=16, kv_capacity_tokens=65_536
)


class TestRemoteEngine(EngineContract):
    @pytest.fixture(params=["tcp", "tcp with keys", "ipc"])
    async def engine(self, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RemoteEngine]:
        keys = ChannelKeys.make() if "keys" in request.param else None
        address = f"ipc://{tmp_path}/c" if request.param == "ipc" else "tcp://127.0.0.1:*"
        inner = SimulatedEngine(CONFIG)
        await inner.start()
        server = EngineServer(inner, address, keys)
        remote = RemoteEngine(await server.start(), keys)
        await remote.start()
        yield remote
        await remote.close()
        assert inner.load().active_requests == 0
        await server.close()
        await inner.close()
