"""What the status page shows: load, and rates and latencies of the last minute, sampled once a second."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import msgspec

from vllm_deepinfer.engine import Engine
from vllm_deepinfer.gateway.limits.admission import Admission
from vllm_deepinfer.gateway.metrics import CheapHistogram, GatewayMetrics, Totals

WINDOW = 60  # samples, one a second


@dataclass(frozen=True)
class _Sample:
    at: float
    totals: Totals
    ttft: list[int]
    itl: list[int]
    active: int


class StatusBoard:
    """Keeps a minute of samples. Args: clock: monotonic seconds."""

    def __init__(
        self,
        engine: Engine,
        metrics: GatewayMetrics,
        admission: Admission,
        model: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._engine = engine
        self._metrics = metrics
        self._admission = admission
        self._clock = clock
        self._started = clock()
        self._samples: deque[_Sample] = deque(maxlen=WINDOW + 1)
        self.sample()

    async def run(self) -> None:
        """Sample for ever."""
        while True:
            await asyncio.sleep(1.0)
            self.sample()

    def sample(self) -> None:
        """Take one sample."""
        metrics = self._metrics
        totals = Totals(**asdict(metrics.totals))
        self._samples.append(
            _Sample(
                self._clock(), totals, metrics.ttft.snapshot(), metrics.itl.snapshot(), self._admission.active
            )
        )

    def report(self) -> dict[str, Any]:
        """The page's data; times in milliseconds, null where nothing was measured in the last minute."""
        metrics, first, now = self._metrics, self._samples[0], self._clock()
        seconds = max(now - first.at, 1e-9)
        recent = {name: value - getattr(first.totals, name) for name, value in asdict(metrics.totals).items()}
        prompt = recent["prompt_tokens"]
        health = self._engine.health()
        return {
            "model": self._model,
            "uptime_s": round(now - self._started, 1),
            "health": {"state": str(health.state), "detail": health.detail},
            "draining": self._admission.draining,
            "active_requests": self._admission.active,
            "busy": round(self._admission.meter.share, 3),
            "load": msgspec.to_builtins(self._engine.load()),
            "totals": asdict(metrics.totals),
            "last_minute": {
                **recent,
                "requests_per_s": round(recent["requests"] / seconds, 2),
                "output_tokens_per_s": round(recent["output_tokens"] / seconds, 1),
                "hit_rate": round(recent["cached_tokens"] / prompt, 4) if prompt else None,
                "ttft_ms": _quantiles(metrics.ttft, first.ttft),
                "itl_ms": _quantiles(metrics.itl, first.itl),
            },
            "history": {
                "active": [sample.active for sample in self._samples],
                "output_tokens": _steps([sample.totals.output_tokens for sample in self._samples]),
                "errors": _steps([sample.totals.failed + sample.totals.refused for sample in self._samples]),
            },
        }


def _quantiles(histogram: CheapHistogram, before: list[int]) -> dict[str, float | None]:
    """Upper bounds of the buckets that hold the quantiles."""
    values = {name: histogram.quantile(q, before) for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}
    return {name: None if value is None else value * 1e3 for name, value in values.items()}


def _steps(values: list[int]) -> list[int]:
    return [later - earlier for earlier, later in pairwise(values)]
