"""A gateway on a simulated engine in its own process: `python -m … PORT FOLDER SIMULATED`.

SIMULATED is JSON of `recipes.simulated.Simulated`, as in a pool of a recipe. It is what an external router
stands in front of, and what streaming through pools is compared with.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvicorn

from vllm_deepinfer.engine.simulated import SimulatedEngine, chained_tokens
from vllm_deepinfer.gateway import logs
from vllm_deepinfer.gateway.building import build_app
from vllm_deepinfer.gateway.engines import vocabulary
from vllm_deepinfer.gateway.serve import calm_garbage_collection
from vllm_deepinfer.gateway.settings import GatewaySettings
from vllm_deepinfer.gateway.streaming.lane import LaneProtocol
from vllm_deepinfer.recipes.simulated import Simulated

MODEL = "bench"


def engine_of(folder: Path, simulated: Simulated) -> SimulatedEngine:
    """As a pool's replica makes it."""
    words = vocabulary(folder)
    config = simulated.config(MODEL, vocab_size=words["vocab_size"], eos_token_id=words["eos_token_id"])
    return SimulatedEngine(config, tokens=chained_tokens(config.vocab_size))


async def main(port: int, folder: Path, simulated: Simulated) -> None:
    """Serve until killed."""
    settings = GatewaySettings(
        served_names=(MODEL,), max_active=8192, max_waiting=8192, max_busy=None, drain_timeout_s=0
    )
    app = build_app(engine_of(folder, simulated), folder, settings)
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=port,
        http=LaneProtocol,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=60,
    )
    calm_garbage_collection()  # as the real command does
    logs.configure("warning")
    await uvicorn.Server(config).serve()


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(int(sys.argv[1]), Path(sys.argv[2]), Simulated.model_validate_json(sys.argv[3])))
