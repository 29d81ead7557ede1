"""A gateway on a scripted engine, reachable over a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from anthropic import AsyncAnthropic
from deepseek_recipe import ModelVersion, Tokenizer
from openai import AsyncOpenAI

from vllm_deepinfer.engine import GenerateRequest
from vllm_deepinfer.engine.simulated import SimulatedConfig, SimulatedEngine, Speculation, scripted_tokens
from vllm_deepinfer.gateway.app import GatewayApp
from vllm_deepinfer.gateway.building import build_app
from vllm_deepinfer.gateway.limits.keys import KeyRing
from vllm_deepinfer.gateway.settings import GatewaySettings
from vllm_deepinfer.gateway.streaming.lane import LaneProtocol
from vllm_deepinfer.policy.step_cost import StepCost

DATA = Path(__file__).parent / "data"
TOKENIZER = Tokenizer.from_file(str(DATA / "tokenizer.json"))
EOS = 1
MODEL = "tiny-v4.1"
FAST = StepCost(per_step=2e-4, per_token=0.0)

CALL = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="{name}">\n{parameters}</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)


def ids_of(text: str) -> list[int]:
    """Ids as a model would produce them: control tokens as such."""
    return TOKENIZER.encode(text)


def call(name: str, **arguments: Any) -> str:
    """A V4.1 tool call as the model writes it."""
    return calls((name, arguments))


def calls(*several: tuple[str, dict[str, Any]]) -> str:
    """A block of V4.1 tool calls."""
    blocks = []
    for name, arguments in several:
        parameters = "".join(
            f'<｜DSML｜ parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
            f"{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜ parameter>\n"
            for key, value in arguments.items()
        )
        blocks.append(f'<｜DSML｜ invoke name="{name}">\n{parameters}</｜DSML｜ invoke>\n')
    return f"\n\n<｜DSML｜ calls>\n{''.join(blocks)}</｜DSML｜ calls>"


@dataclass
class Script:
    """What the engine answers: texts in turn, the last one for ever; or a function of the request."""

    texts: list[str] = field(default_factory=lambda: ["hmm</think>Hello there."])
    function: Callable[[GenerateRequest], Sequence[int]] | None = None
    requests: list[GenerateRequest] = field(default_factory=list)

    def __call__(self, request: GenerateRequest) -> Sequence[int]:
        self.requests.append(request)
        if self.function is not None:
            return self.function(request)
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        return ids_of(text)


@dataclass
class Gateway:
    """A running gateway and its clients."""

    app: GatewayApp
    engine: SimulatedEngine
    script: Script
    url: str
    http: httpx.AsyncClient
    openai: AsyncOpenAI
    anthropic: AsyncAnthropic

    def prompt(self, index: int = -1) -> str:
        """The prompt of a request that the engine has seen, control tokens spelled out."""
        return self.app.core.runner.prompts.decode(self.script.requests[index].prompt_token_ids)

    async def idle(self) -> None:
        """Wait until the engine has nothing left to do."""
        async with asyncio.timeout(30):
            while self.engine.load().active_requests or self.app.core.admission.active:
                await asyncio.sleep(0.001)


def make_app(
    script: Script,
    *,
    keys: KeyRing | None = None,
    config: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[GatewayApp, SimulatedEngine]:
    """An app on a simulated engine that answers from `script`."""
    sizes: dict[str, Any] = {"cost": FAST, "max_model_len": 8192, "vocab_size": 512, "eos_token_id": EOS}
    engine = SimulatedEngine(SimulatedConfig(**(sizes | (config or {}))), tokens=scripted_tokens(script, EOS))
    chosen = GatewaySettings(served_names=(MODEL, "alias"), **settings)
    return build_app(engine, DATA, chosen, keys, version=ModelVersion.DeepseekV41Flash), engine


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """Serve an ASGI app on a free loopback port; yields its URL."""
    config = uvicorn.Config(
        app, port=0, http=LaneProtocol, log_level="warning", access_log=False, lifespan="on"
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve())
    while not server.started:
        if task.done():
            task.result()
        await asyncio.sleep(0.002)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def running(
    *texts: str,
    key: str = "none",
    tokens_per_step: int = 1,
    **options: Any,
) -> AsyncIterator[Gateway]:
    """A gateway that answers `texts`, and clients for it.

    Args:
        tokens_per_step: more than one: every delta holds so many tokens.
    """
    script = Script(list(texts)) if texts else Script()
    if tokens_per_step > 1:
        speculation = Speculation(draft_tokens=tokens_per_step - 1, acceptance=1.0)
        options["config"] = {"speculation": speculation} | options.get("config", {})
    app, engine = make_app(script, **options)
    async with listening(app) as url:
        http = httpx.AsyncClient(base_url=url, timeout=20)
        openai = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=20)
        anthropic = AsyncAnthropic(base_url=url, api_key=key, max_retries=0, timeout=20)
        async with http, openai, anthropic:
            yield Gateway(app, engine, script, url, http, openai, anthropic)


def events(text: str) -> list[tuple[str | None, Any]]:
    """Server-sent events of a whole body: name and data, JSON decoded."""
    found = []
    for block in text.split("\n\n"):
        name, data = None, None
        for line in block.split("\n"):
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                data = line[6:]
        if data is not None:
            found.append((name, data if data == "[DONE]" else json.loads(data)))
    return found


_HI: Any = [{"role": "user", "content": "hi"}]
ASKS: dict[str, Any] = {
    "/v1/chat/completions": {"model": MODEL, "messages": _HI},
    "/v1/responses": {"model": MODEL, "input": "hi"},
    "/v1/messages": {"model": MODEL, "max_tokens": 500, "messages": _HI},
}
"""The least that each API wants, by path."""
