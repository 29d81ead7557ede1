"""A gateway on a simulated engine in its own process: `python -m … PORT FOLDER SIMULATED [router]`.

SIMULATED is JSON of `recipes.simulated.Simulated`, as in a pool of a recipe. This is what vllm-router stands
in front of (then with `router`), and what streaming through pools is compared with.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec
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
ADDED = frozenset(
    {
        "logprobs",
        "no_stop_trim",
        "continue_final_message",
        "skip_special_tokens",
        "separate_reasoning",
        "stream_reasoning",
        "return_hidden_states",
        "include_reasoning",
    }
)


def engine_of(folder: Path, simulated: Simulated) -> SimulatedEngine:
    """As a pool's replica makes it."""
    words = vocabulary(folder)
    config = simulated.config(MODEL, vocab_size=words["vocab_size"], eos_token_id=words["eos_token_id"])
    return SimulatedEngine(config, tokens=chained_tokens(config.vocab_size))


class BehindRouter:
    """Drops what vllm-router adds to every body: vLLM's server takes it, our gateway refuses it."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        asked = msgspec.json.decode(body)
        body = msgspec.json.encode({name: value for name, value in asked.items() if name not in ADDED})
        headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Any:
            return parts.pop() if parts else await receive()

        await self._app({**scope, "headers": headers}, again, send)


async def main(port: int, folder: Path, simulated: Simulated, behind_router: bool) -> None:
    """Serve until killed."""
    settings = GatewaySettings(
        served_names=(MODEL,), max_active=8192, max_waiting=8192, max_busy=None, drain_timeout_s=0
    )
    app = build_app(engine_of(folder, simulated), folder, settings)
    config = uvicorn.Config(
        BehindRouter(app) if behind_router else app,
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
        simulated = Simulated.model_validate_json(sys.argv[3])
        runner.run(main(int(sys.argv[1]), Path(sys.argv[2]), simulated, "router" in sys.argv[4:]))
