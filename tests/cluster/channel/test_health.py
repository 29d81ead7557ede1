"""What a replica says of a wedged engine, with and without work."""

from __future__ import annotations

from tests.engine.recorder import Recorder, eventually, request_of
from vllm_deepinfer.cluster.channel import EngineServer
from vllm_deepinfer.engine import HealthState
from vllm_deepinfer.engine.simulated import SimulatedConfig, SimulatedEngine
from vllm_deepinfer.policy.step_cost import StepCost


async def test_a_wedged_engine_stays_wedged_until_it_makes_a_step() -> None:
    engine = SimulatedEngine(
        SimulatedConfig(cost=StepCost(per_step=1e-3, per_token=1e-6), wedge_after_s=0.05, vocab_size=999)
    )
    await engine.start()
    server, sink = EngineServer(engine), Recorder()
    request = request_of([30] * 9, max_tokens=500)
    await engine.submit(request, sink)
    await sink.started(request.request_id, 3)
    assert server.health().state is HealthState.READY
    engine.hang()
    await eventually(lambda: server.health().state is HealthState.WEDGED)
    await engine.abort([request.request_id])
    assert engine.health().state is HealthState.READY, "it has nothing to do"
    assert server.health().state is HealthState.WEDGED
    engine.resume()
    again = request_of([30] * 9)
    await engine.submit(again, sink)
    await sink.ended(again.request_id)
    assert server.health().state is HealthState.READY
    engine.crash()
    assert server.health().state is HealthState.DEAD
    await engine.close()
