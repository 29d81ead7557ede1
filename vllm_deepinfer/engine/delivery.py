"""Hands the deltas of one step to their sinks; shared by the engines."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from vllm_deepinfer.engine.base import Sink
from vllm_deepinfer.engine.messages import TokenDelta

logger = logging.getLogger(__name__)


class Deliveries:
    """Groups deltas by sink and calls each sink once.

    Attributes:
        failures: how often a sink has raised; the deltas of that call are lost to it, nothing else is.
    """

    def __init__(self) -> None:
        self.failures = 0

    def send(self, deltas: Iterable[tuple[Sink, TokenDelta]]) -> None:
        """Deliver one step. Never raises an Exception."""
        batches: dict[Sink, list[TokenDelta]] = {}
        for sink, delta in deltas:
            batch = batches.get(sink)
            if batch is None:
                batches[sink] = [delta]
            else:
                batch.append(delta)
        for sink, batch in batches.items():
            try:
                sink(batch)
            except Exception:
                self._failed(batch)

    def _failed(self, batch: list[TokenDelta]) -> None:
        self.failures += 1
        if (
            self.failures == 1
        ):  # a sink that is broken is broken at every step: one log line, then the counter
            logger.exception("A sink raised; the deltas of %d requests were lost to it.", len(batch))
