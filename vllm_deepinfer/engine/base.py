"""The Engine protocol: tokens in, batches of token deltas out.

Everything above an engine (gateway, cluster, bench) is written against this and never against vLLM.

A stream is not a generator of its own. One engine step produces a delta for many requests at once, and what
a front door pays per token is mostly the hand-over: 33 µs with an async generator per stream, 16 µs with
one callback for all (256 streams, one core). So a caller gives `submit` a *sink*, and an engine calls each
sink once per step with the deltas of all its requests. `vllm_deepinfer.engine.stream` has the generator for
callers that do not mind.

Invariants, which `tests/engine/contract.py` checks on every implementation:

1.  `submit` either raises an `EngineError`, and then no delta of the request is ever delivered; or the
    request is accepted, and then exactly one final delta is delivered, whatever happens: end, abort, drain,
    close, death of the engine.
2.  Nothing is delivered for a request after its final delta. Deltas of one request arrive in order;
    concatenated, their tokens are the answer: none is dropped or repeated.
3.  A sink is called at most once per engine step, on the event loop's thread, and never from inside `submit`.
    Deltas may arrive before the caller of `submit` runs again: register the stream first.
4.  `abort` is idempotent and may come at any time and in any order with finish: ids that are unknown or
    have ended are ignored. When it returns, every named request has had its final delta and its KV is free
    or about to be; the final delta is delivered before `abort` first suspends, so that a cancelled caller
    has still aborted.
5.  A sink that raises harms only the delivery it raised in: other sinks and later steps are served, and the
    failure is logged and counted by the engine.
6.  A request id may be used again once its final delta has been delivered; one whose KV is held (below) once
    it is released.

Hand-over (`EngineInfo.hands_over`; others refuse such requests with InvalidRequest):

7.  A request with `KvHandOver.keep` that has ended by LENGTH or STOP still *holds* the KV of its prompt, and
    its final delta says in `kv_source` where it is. It is counted in `Load.held_requests` and
    `Load.kv_tokens_used` until another engine has fetched it, until `abort` names it, which releases it at
    once, or until a lease of the engine's own expires, whichever comes first.
8.  A request with `KvHandOver.source` gives the same answer whether its KV can be fetched or not: an engine
    that cannot fetch it, because the other is dead, has released it or lays its KV out otherwise, computes
    the prompt itself, or ends the request by ERROR before its first token. It waits no longer than a
    deadline of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

from vllm_deepinfer.engine.messages import EngineInfo, GenerateRequest, Health, Load, TokenDelta

Sink = Callable[[Sequence[TokenDelta]], None]
"""Receives the deltas of one engine step. Must not block: it runs between two steps of every stream."""


@runtime_checkable
class Engine(Protocol):
    """One engine, used from one event loop."""

    @property
    def info(self) -> EngineInfo:
        """Fixed facts; before `start` perhaps only the model's name."""
        ...

    async def start(self) -> None:
        """Make the engine ready. Raises: EngineDead if it cannot start."""
        ...

    async def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Accept `request`; its deltas go to `sink`. One sink object may serve any number of requests.

        Raises:
            InvalidRequest: it can never be served here; also an id that is alive.
            Overloaded: the queue is full.
            EngineUnavailable: not started, draining, closed or dead.
        If the caller is cancelled inside, the request is not accepted (invariant 1).
        """
        ...

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests with FinishReason.ABORT (invariant 4), and release what those that have ended
        still hold for another engine (invariant 7). Never raises for an id."""
        ...

    def load(self) -> Load:
        """Current load; cheap, no I/O."""
        ...

    def health(self) -> Health:
        """Current health; cheap, no I/O."""
        ...

    async def drain(self) -> None:
        """Accept nothing more; return when every accepted request has ended. Idempotent."""
        ...

    async def close(self) -> None:
        """Stop. Requests that are alive end with FinishReason.ERROR. Idempotent."""
        ...
