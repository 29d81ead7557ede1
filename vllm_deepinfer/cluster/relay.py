"""A request on its way through two pools: where it is, and what the caller has of it."""

from __future__ import annotations

from typing import Any

import msgspec

from vllm_deepinfer.engine import (
    Engine,
    FinishReason,
    GenerateRequest,
    KvHandOver,
    SamplingParams,
    Sink,
    TokenDelta,
)

from .continuation import Repeats, resumed

PREFILL = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
"""Sampling of the prefill pool's part; its one token is thrown away."""


class Relayed:
    """A request that has not ended.

    Attributes:
        emitted: what the caller has of the answer.
        cached: prompt tokens that the prefix cache of the engine that prefilled first has served; None: that
            engine has not told yet, or there was none.
        engine, attempt: where it is and under which id; None and "" between two engines.
        prefilling: whether it is there to be prefilled.
        hold: id under which the prefill pool holds its KV; "": not that anybody knew.
        source: where that is.
        losses: engines that were lost under it.
        repeats: cuts off what an attempt gives again.
    """

    __slots__ = (
        "_attempts",
        "attempt",
        "cached",
        "emitted",
        "engine",
        "hold",
        "losses",
        "prefilling",
        "repeats",
        "request",
        "sink",
        "source",
    )

    def __init__(self, request: GenerateRequest, sink: Sink) -> None:
        self.request, self.sink = request, sink
        self.emitted: list[int] = []
        self.cached: int | None = None
        self.engine: Engine | None = None
        self.attempt, self.hold, self.prefilling = "", "", False
        self.source: dict[str, Any] | None = None
        self._attempts = self.losses = 0
        self.repeats = Repeats()

    def next(self, engine: Engine, hand_over: KvHandOver | None) -> GenerateRequest:
        """The rest of the request, for that engine, under a new id."""
        self._attempts += 1
        self.engine, self.attempt = engine, f"{self.request.request_id}@{self._attempts}"
        self.prefilling = hand_over is not None and hand_over.keep
        rest, self.repeats = resumed(self.request, self.emitted, self.attempt)
        sampling = PREFILL if self.prefilling else rest.sampling
        return msgspec.structs.replace(rest, hand_over=hand_over, sampling=sampling)

    def leave(self) -> None:
        """It is at no engine."""
        self.engine, self.attempt, self.prefilling = None, "", False

    def renamed(self, delta: TokenDelta, *, last: bool) -> TokenDelta:
        """An engine's delta as the caller's; `last`: its end, if it is one, is the request's."""
        cached = delta.cached_tokens if self.cached is None else self.cached
        changes: dict[str, object] = {"request_id": self.request.request_id, "cached_tokens": cached}
        if not last:
            changes |= {"finish_reason": None, "stop_reason": None, "error": None}
        return msgspec.structs.replace(delta, **changes)

    def final(self, reason: FinishReason, why: str | None) -> TokenDelta:
        """Its end from outside an engine."""
        return TokenDelta(self.request.request_id, (), reason, cached_tokens=self.cached or 0, error=why)
