"""StepHub: the one sink of a gateway. It takes the deltas of an engine step to their requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from vllm_deepinfer.engine import Engine, TokenDelta
from vllm_deepinfer.gateway.metrics import GatewayMetrics
from vllm_deepinfer.gateway.streaming.sse import SlowReader

logger = logging.getLogger(__name__)


class Receiver(Protocol):
    """One choice of one request, waiting for its deltas."""

    request_id: str

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
        """The engine's sink. An error in one stream ends that stream and no other."""
        now = self._clock()
        if self._fresh:
            deltas = self._first_tokens_first(deltas)
        stop: list[str] = []
        for delta in deltas:
            receiver = self._receivers.get(delta.request_id)
            if receiver is None:
                continue
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
                if delta.finish_reason is None:
                    stop.append(delta.request_id)
        if stop:
            self.abort(stop)

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
