"""ServePools on a fake Serve, for tests, and what a request must be answered with."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.cluster.application.fake_serve import CONFIG, FakeServe
from tests.engine.recorder import Recorder
from vllm_deepinfer.cluster.application.serve_pool import ServePool
from vllm_deepinfer.engine import FinishReason, GenerateRequest
from vllm_deepinfer.engine.simulated import SimulatedConfig, chained_tokens

ANSWERS = chained_tokens(CONFIG.vocab_size)
_names = itertools.count(1)


def wanted(request: GenerateRequest) -> list[int]:
    """All tokens of a request that runs to max_tokens, whoever answers it, in how many parts soever."""
    token_at = ANSWERS(request)
    return [token_at(position) for position in range(request.sampling.max_tokens or 0)]


def check_all(sink: Recorder, requests: list[GenerateRequest], *, aborted: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """Each ended once (the recorder sees to that), with its tokens and no others."""
    for request in requests:
        tokens = sink.tokens.get(request.request_id, [])
        final = sink.finals[request.request_id]
        assert tokens == wanted(request)[: len(tokens)], (
            f"{request.request_id} lacks a token or has one twice"
        )
        if request.request_id not in aborted:
            assert final.finish_reason is FinishReason.LENGTH, final
            assert len(tokens) == request.sampling.max_tokens


def pool_on(serve: FakeServe, role: str = "aggregated", **settings: Any) -> ServePool:
    """Another gateway's pool; the view is per process and pool, so each gets a name of its own."""
    name = f"pool{next(_names)}"
    pool = ServePool(
        name,
        role,
        serve.handle(name, role),
        gateway=f"g-{name}",
        **{"room_s": 10.0, "patience_s": 10.0, "start_s": 10.0, "attempts": 50, **settings},
    )
    pool._watch_s = 0.02
    return pool


@asynccontextmanager
async def serving(
    count: int = 2, config: SimulatedConfig = CONFIG, *, most: int = 512, **settings: Any
) -> AsyncIterator[tuple[ServePool, FakeServe]]:
    """A started pool over that many replicas; in the end nothing may be left on any."""
    serve = FakeServe()
    for _ in range(count):
        await serve.add(config, most)
    pool = pool_on(serve, **settings)
    await pool.start()
    try:
        yield pool, serve
    finally:
        await pool.close()
        await serve.close()
        assert not pool._leases and not pool._joins and not pool.view._routed and not pool.view._assigned
