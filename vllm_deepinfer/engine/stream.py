"""Convenience for callers that want one stream, not the cheapest hand-over: tests, scripts, small tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import msgspec

from vllm_deepinfer.engine.base import Engine
from vllm_deepinfer.engine.messages import FinishReason, GenerateRequest, TokenDelta, TokenLogprobs


async def stream(engine: Engine, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
    """Yield the deltas of one request, the final one included.

    Leaving the iteration early aborts the request; wrap it in `contextlib.aclosing` so that this happens at
    once.

    Raises: whatever `Engine.submit` raises. A request that fails later ends with a delta, not with an
        exception.
    """
    queue: asyncio.Queue[TokenDelta] = asyncio.Queue()

    def put(deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            queue.put_nowait(delta)

    await engine.submit(request, put)
    try:
        while True:
            delta = await queue.get()
            yield delta
            if delta.final:
                return
    finally:
        await engine.abort((request.request_id,))


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer: the deltas of one request put together; fields as in TokenDelta."""

    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0
    accepted_draft_tokens: int = 0
    error: str | None = None


async def collect(engine: Engine, request: GenerateRequest) -> Completion:
    """Run one request to its end. Raises: whatever `Engine.submit` raises."""
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    accepted = 0
    last: TokenDelta | None = None
    async for last in stream(engine, request):
        tokens += last.token_ids
        logprobs += last.logprobs or ()
        accepted += last.accepted_draft_tokens
    assert last is not None and last.finish_reason is not None  # invariant 1
    return Completion(
        token_ids=tokens,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=logprobs if request.sampling.logprobs is not None else None,
        cached_tokens=last.cached_tokens,
        accepted_draft_tokens=accepted,
        error=last.error,
    )
