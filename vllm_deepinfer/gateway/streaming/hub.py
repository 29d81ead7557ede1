"""StepHub: the one sink of a gateway. It takes the deltas of an engine step to their requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from vllm_deepinfer.engine import Engine, TokenDelta
from vllm_deepinfer.gateway.metrics import GatewayMetrics
from vllm_deepinfer.gateway.streaming.lane import Lane, write_burst
from vllm_deepinfer.gateway.streaming.sse import SlowReader

logger = logging.getLogger(__name__)

SLICE = 32  # deltas that are written before the event loop gets a turn: 0.2 to 0.4 ms


class Receiver(Protocol):
    """One choice of one request, waiting for its deltas."""

    request_id: str
    lane: Lane | None

    def quick(self, delta: TokenDelta, now: float) -> bytes | None:
        """A frame for `lane` if that is all that this delta makes, taken as delivered; else None."""
        ...

    def deliver(self, delta: TokenDelta, now: float) -> bool:
        """Take a delta; return whether the engine may stop working on this request."""
        ...

    def broken(self, error: Exception) -> None:
        """`deliver` raised."""
        ...


class StepHub:
    """Dispatches deltas without a task or queue per stream.

    Args:
        engine: where to abort.
        metrics: counts what is dropped.
        clock: monotonic seconds; read once per step.
    """

    def __init__(
        self, engine: Engine, metrics: GatewayMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._clock = clock
        self._receivers: dict[str, Receiver] = {}
        self._fresh: set[str] = set()  # those without a delta yet
        self._rest: Sequence[TokenDelta] = ()  # of the step in work, from `_next` on
        self._next = 0
        self._now = 0.0
        self._aborts: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._receivers)

    def add(self, receiver: Receiver) -> None:
        """Register before `Engine.submit`: deltas may come before that returns."""
        self._receivers[receiver.request_id] = receiver
        self._fresh.add(receiver.request_id)

    def remove(self, request_ids: Iterable[str]) -> None:
        """Forget receivers; what the engine still sends for them is dropped."""
        for request_id in request_ids:
            self._receivers.pop(request_id, None)
            self._fresh.discard(request_id)

    def sink(self, deltas: Sequence[TokenDelta]) -> None:
        """The engine's sink. An error in one stream ends that stream and no other.

        A large step is written in slices; between two of them the event loop may take in new requests, which
        would wait for milliseconds otherwise. Whatever comes next from the engine waits for the last slice.
        """
        while self._rest:
            self._slice()
        self._now = self._clock()
        if self._fresh:
            deltas = self._first_tokens_first(deltas)
        self._rest, self._next = deltas, 0
        self._continue()

    def _continue(self) -> None:
        if self._rest:
            self._slice()
        if self._rest:
            asyncio.get_running_loop().call_soon(self._continue)

    def _slice(self) -> None:
        """Deliver the next deltas of the step."""
        start, rest = self._next, self._rest
        part = rest if len(rest) <= SLICE else rest[start : start + SLICE]
        self._next = start + len(part)
        if self._next >= len(rest):
            self._rest = ()
        now, receivers = self._now, self._receivers
        burst: list[tuple[Lane, bytes]] = []
        stop: list[str] = []
        for delta in part:
            receiver = receivers.get(delta.request_id)
            if receiver is None:
                continue
            try:
                frame = receiver.quick(delta, now)
            except Exception:  # `deliver` will meet it too, and knows what to do
                frame = None
            if frame is not None:
                burst.append((receiver.lane, frame))  # type: ignore[arg-type]  # there is one with a frame
                continue
            if burst:  # a stream may have two deltas in one step
                write_burst(burst)
                burst.clear()
            if self._deliver(receiver, delta, now):
                stop.append(delta.request_id)
        write_burst(burst)
        if stop:
            self.abort(stop)

    def _deliver(self, receiver: Receiver, delta: TokenDelta, now: float) -> bool:
        """Whether the engine should stop working on this request."""
        try:
            done = receiver.deliver(delta, now)
        except SlowReader as error:  # the client's doing
            done = True
            receiver.broken(error)
        except Exception as error:
            done = True
            logger.error("stream failed", extra={"request": delta.request_id}, exc_info=error)
            receiver.broken(error)
        if done or delta.finish_reason is not None:
            self._receivers.pop(delta.request_id, None)
        return done and delta.finish_reason is None

    def _first_tokens_first(self, deltas: Sequence[TokenDelta]) -> Sequence[TokenDelta]:
        """A step of 256 streams takes 4 ms to write: that is nothing between tokens, and a lot before the
        first.
        """
        fresh = self._fresh
        first = [delta for delta in deltas if delta.request_id in fresh]
        if not first:
            return deltas
        rest = [delta for delta in deltas if delta.request_id not in fresh]
        fresh.difference_update([delta.request_id for delta in first])
        return first + rest

    def abort(self, request_ids: Iterable[str]) -> None:
        """Stop the engine's work on requests, without waiting for it."""
        ids = list(request_ids)
        self.remove(ids)
        task = asyncio.get_running_loop().create_task(self._engine.abort(ids))
        self._aborts.add(task)
        task.add_done_callback(self._aborted)

    async def abort_all(self) -> None:
        """End everything that is still in work; its receivers get the engine's final deltas."""
        if self._receivers:
            await self._engine.abort(list(self._receivers))

    def _aborted(self, task: asyncio.Task[None]) -> None:
        self._aborts.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._metrics.failures.labels("abort").inc()
            logger.error("the engine did not abort", exc_info=error)
