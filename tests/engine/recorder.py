"""A sink that checks what it gets, and requests to fill it with."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from vllm_deepinfer.engine import (
    Engine,
    GenerateRequest,
    KvHandOver,
    SamplingParams,
    TokenDelta,
)

_ids = itertools.count()


class Recorder:
    """A sink that checks, at every delivery, what invariants 1 to 3 promise, and keeps what it got."""

    def __init__(self) -> None:
        self.calls: list[list[TokenDelta]] = []
        self.tokens: dict[str, list[int]] = {}
        self.finals: dict[str, TokenDelta] = {}
        self._ended: dict[str, asyncio.Event] = {}

    def __call__(self, deltas: Sequence[TokenDelta]) -> None:
        ids = [delta.request_id for delta in deltas]
        assert ids and len(set(ids)) == len(ids), "at least one delta, and at most one per request and step"
        self.calls.append(list(deltas))
        for delta in deltas:
            assert delta.request_id not in self.finals, "nothing comes after the final delta"
            assert delta.token_ids or delta.final, "a delta without tokens is a final one"
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.final:
                self.finals[delta.request_id] = delta
                self._event(delta.request_id).set()

    def _event(self, request_id: str) -> asyncio.Event:
        return self._ended.setdefault(request_id, asyncio.Event())

    async def ended(self, *request_ids: str) -> None:
        """Wait for the final deltas of these requests."""
        for request_id in request_ids:
            await asyncio.wait_for(self._event(request_id).wait(), 120)

    async def started(self, request_id: str, tokens: int = 1) -> None:
        """Wait until a request has that many tokens, or has ended."""
        await eventually(lambda: len(self.tokens.get(request_id, ())) >= tokens or request_id in self.finals)


async def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until `condition()` holds; fails when it does not become true."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


def prompt_of(engine: Engine, length: int, seed: int) -> list[int]:
    """Random ordinary token ids."""
    rng, vocab_size = random.Random(seed), engine.info.vocab_size or 256
    return [rng.randrange(20, vocab_size) for _ in range(length)]


def request_of(
    prompt: Sequence[int], request_id: str = "", salt: str | None = None, **sampling: object
) -> GenerateRequest:
    """A greedy request with a new id that runs to max_tokens (16)."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return GenerateRequest(
        request_id=request_id or f"r{next(_ids)}", prompt_token_ids=prompt, sampling=params, cache_salt=salt
    )


def keeping(prompt: Sequence[int], salt: str | None = None) -> GenerateRequest:
    """A request whose KV is kept."""
    request = request_of(prompt, salt=salt, max_tokens=1)
    return msgspec.structs.replace(request, hand_over=KvHandOver(keep=True))


def fetching_from(source: dict[str, Any], request: GenerateRequest) -> GenerateRequest:
    """The request, its prompt's KV to be fetched from there."""
    return msgspec.structs.replace(request, hand_over=KvHandOver(source=source))
