"""Our front door as a process: the gateway on a ChannelEngine. `python -m … SOCKET PORT FOLDER MAX_BUSY`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvicorn

from vllm_deepinfer.bench.gateway.channel import ChannelEngine
from vllm_deepinfer.engine import EngineInfo
from vllm_deepinfer.gateway import logs
from vllm_deepinfer.gateway.building import build_app
from vllm_deepinfer.gateway.serve import calm_garbage_collection
from vllm_deepinfer.gateway.settings import GatewaySettings
from vllm_deepinfer.gateway.streaming.lane import LaneProtocol

MODEL = "bench"


async def main(socket: str, port: int, folder: Path, max_busy: float | None) -> None:
    """Serve until killed."""
    info = EngineInfo(model=MODEL, max_model_len=32_768, eos_token_ids=(1,), vocab_size=129_280)
    settings = GatewaySettings(
        served_names=(MODEL,), max_active=8192, max_waiting=8192, max_busy=max_busy, drain_timeout_s=0
    )
    app = build_app(ChannelEngine(socket, info), folder, settings)
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
    logs.configure("warning")  # and a line for every request, into this process's log
    await uvicorn.Server(config).serve()


if __name__ == "__main__":
    import uvloop

    busy = float(sys.argv[4])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), busy or None))
