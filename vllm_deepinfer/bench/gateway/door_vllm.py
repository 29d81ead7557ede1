"""Our front door on a real engine, a process: `python -m … PORT MODEL TOKENIZER ENGINE_FLAGS…`.

The model's folder needs no DeepSeek config: any small model shows what the front door costs.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvicorn
from deepseek_recipe import ModelVersion

from vllm_deepinfer.bench.gateway.door import MODEL
from vllm_deepinfer.gateway import logs
from vllm_deepinfer.gateway.building import build_app
from vllm_deepinfer.gateway.engines import make_engine
from vllm_deepinfer.gateway.serve import calm_garbage_collection
from vllm_deepinfer.gateway.settings import GatewaySettings
from vllm_deepinfer.gateway.streaming.lane import LaneProtocol


async def main(port: int, model: Path, tokenizer: Path, flags: list[str]) -> None:
    """Serve until killed."""
    engine = make_engine("vllm", model, flags)
    await engine.start()
    try:
        settings = GatewaySettings(served_names=(MODEL,), drain_timeout_s=0)
        app = build_app(engine, tokenizer, settings, version=ModelVersion.DeepseekV41Flash)
        app.own_engine = False
        calm_garbage_collection()
        logs.configure("warning")
        config = uvicorn.Config(app, host="127.0.0.1", port=port, http=LaneProtocol, access_log=False)
        await uvicorn.Server(config).serve()
    finally:
        await engine.close()


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
