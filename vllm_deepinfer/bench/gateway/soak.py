"""Soak: thousands of clients of every manner against one gateway on a failing engine, and then a look at what
is left.

Every accepted request must end exactly once, no client may wait for an end that never comes, memory must not
grow, and nothing may be left in the gateway or the engine.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import statistics
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import uvicorn

from vllm_deepinfer.bench.gateway.ledger import LedgerEngine
from vllm_deepinfer.bench.gateway.visitors import plan, visit
from vllm_deepinfer.checkpoint.tokenizer import small_tokenizer, tokenizer_files
from vllm_deepinfer.engine import Overloaded
from vllm_deepinfer.engine.simulated import SimulatedConfig, SimulatedEngine
from vllm_deepinfer.engine.simulated.config import Speculation
from vllm_deepinfer.gateway.app import GatewayApp
from vllm_deepinfer.gateway.building import build_app
from vllm_deepinfer.gateway.settings import GatewaySettings
from vllm_deepinfer.gateway.streaming.lane import LaneProtocol
from vllm_deepinfer.policy.step_cost import StepCost

CLIENTS = 100  # at once
SAMPLES = 60  # of memory, over the whole run
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class SoakResult:
    """What a soak found.

    Attributes:
        accepted, ended: requests that the engine took, and final deltas; equal if each ended once.
        outcomes: visits by how they ended. faults: what must not happen, by kind, with counts.
        rss_bytes: memory of the process over the run, in order.
        leaked: what was still there after the last client had gone, by place; all zero if nothing was.
        examples: of lost visits, why.
    """

    accepted: int
    ended: int
    outcomes: dict[str, int]
    faults: dict[str, int]
    rss_bytes: list[int]
    leaked: dict[str, int]
    examples: list[str] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """Requests that did not end exactly once, for the engine or for their client."""
        return abs(self.accepted - self.ended) + sum(self.faults.values()) + self.outcomes.get("lost", 0)

    @property
    def rss_growth(self) -> float:
        """Growth of memory over the second half, as a fraction; medians of a tenth of the samples at each
        end.
        """
        half = self.rss_bytes[len(self.rss_bytes) // 2 :]
        window = max(1, len(half) // 5)
        return statistics.median(half[-window:]) / statistics.median(half[:window]) - 1


async def soak(requests: int, seed: int = 0) -> SoakResult:
    """Make `requests` visits, CLIENTS at a time."""
    rng = Random(seed)
    engine = _engine()
    ledger = LedgerEngine(engine)
    outcomes: Counter[str] = Counter()
    lost: list[str] = []
    rss: list[int] = []
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            if number % max(1, requests // SAMPLES) == 0:
                gc.collect()
                rss.append(resident_bytes())
            _break_something(engine, ledger, rng)
            outcomes[await visit(port, plan(rng), lost.append)] += 1

    with tempfile.TemporaryDirectory() as folder:
        async with _serving(ledger, Path(folder)) as (app, port):
            await asyncio.gather(*(client() for _ in range(CLIENTS)))
            engine.faults.refuse = None
            leaked = await _left_over(app, engine, ledger)
    faults = dict(ledger.faults)
    return SoakResult(ledger.accepted, ledger.ended, dict(outcomes), faults, rss, leaked, lost[:10])


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def _engine() -> SimulatedEngine:
    config = SimulatedConfig(
        cost=StepCost(per_step=0.002, per_token=1e-6),
        max_model_len=2048,
        kv_capacity_tokens=16_384,  # full at times, so that requests are preempted
        max_num_seqs=64,
        vocab_size=1024,
        speculation=Speculation(draft_tokens=3, acceptance=0.6),
    )
    return SimulatedEngine(config, rng=Random(1))


def _break_something(engine: SimulatedEngine, ledger: LedgerEngine, rng: Random) -> None:
    """One request in 30 fails in the engine, and now and then the engine takes none at all."""
    if rng.random() < 1 / 30:
        engine.faults.fail_requests[ledger.accepted + 1] = rng.randrange(0, 20)
    engine.faults.refuse = Overloaded("the engine is full.") if rng.random() < 0.02 else None


@asynccontextmanager
async def _serving(ledger: LedgerEngine, folder: Path) -> AsyncIterator[tuple[GatewayApp, int]]:
    for name, text in tokenizer_files(small_tokenizer(1024), context_length=2048).items():
        (folder / name).write_text(text, encoding="utf-8")
    settings = GatewaySettings(
        served_names=("bench",), max_pending_bytes=32 << 10, write_timeout_s=2.0, max_responses=100
    )
    app = build_app(ledger, folder, settings)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)  # so that a slow reader is noticed
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http=LaneProtocol, log_level="critical", access_log=False))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield app, listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving


async def _left_over(app: GatewayApp, engine: SimulatedEngine, ledger: LedgerEngine) -> dict[str, int]:
    """What does not go away within ten seconds."""
    left: dict[str, int] = {}
    for _ in range(1000):
        load = engine.load()
        left = {
            "requests in the engine": load.active_requests,
            "KV tokens in use": load.kv_tokens_used,
            "requests in the ledger": len(ledger.open),
            "streams in the hub": len(app.core.hub),
            "places in admission": app.core.admission.active,
        }
        if not any(left.values()):
            break
        await asyncio.sleep(0.01)
    return left
