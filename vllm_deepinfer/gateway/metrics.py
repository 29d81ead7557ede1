"""Prometheus metrics of one gateway. No label holds anything that a client chooses."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from vllm_deepinfer.engine import Engine, Load

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
ITL_BUCKETS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.4, 1, 5)
DURATION_BUCKETS = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class CheapHistogram(Collector):
    """A histogram without labels and locks, for the per-token path: a tenth of the library's cost.

    Observe from one thread only.
    """

    def __init__(self, name: str, documentation: str, buckets: tuple[float, ...]) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._last, self._repeats = 0.0, 0  # the last value, and how often it has come and is not counted yet
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value, in seconds."""
        if value != self._last:  # the streams of one engine step see the same interval
            self._fold()
            self._last = value
        self._repeats += 1

    def _fold(self) -> None:
        """Put repeats where they belong."""
        self._counts[bisect_left(self._bounds, self._last)] += self._repeats
        self._sum += self._last * self._repeats
        self._repeats = 0

    @property
    def sum(self) -> float:
        """Of the values seen."""
        self._fold()
        return self._sum

    @property
    def count(self) -> int:
        """Values seen."""
        self._fold()
        return sum(self._counts)

    def quantile(self, q: float, before: list[int] | None = None) -> float | None:
        """Upper bound of the bucket that holds quantile `q` of what came after the snapshot `before`."""
        self._fold()
        counts = [
            now - then for now, then in zip(self._counts, before or [0] * len(self._counts), strict=True)
        ]
        total = sum(counts)
        if not total:
            return None
        seen = 0
        for bound, count in zip((*self._bounds, self._bounds[-1]), counts, strict=True):
            seen += count
            if seen >= q * total:
                return bound
        return self._bounds[-1]

    def snapshot(self) -> list[int]:
        """Counts per bucket, for `quantile`."""
        self._fold()
        return list(self._counts)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """See prometheus_client."""
        self._fold()
        family = HistogramMetricFamily(self._name, self._documentation)
        seen, rows = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            seen += count
            rows.append(("+Inf" if bound == float("inf") else repr(float(bound)), seen))
        family.add_metric([], rows, self.sum)
        yield family


@dataclass
class Totals:
    """Since the start, for the status page; the same numbers as the counters, cheap to read."""

    requests: int = 0
    refused: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class GatewayMetrics:
    """All metrics of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.registry = registry = CollectorRegistry()
        prefix = "deepinfer_gateway_"
        self.ttft = CheapHistogram(f"{prefix}ttft_seconds", "Request received to first token.", TTFT_BUCKETS)
        self.itl = CheapHistogram(f"{prefix}itl_seconds", "Time between deltas of a stream.", ITL_BUCKETS)
        registry.register(self.ttft)
        registry.register(self.itl)
        self.requests = Counter(
            f"{prefix}requests", "Requests answered.", ["route", "status"], registry=registry
        )
        self._children: dict[tuple[str, int], tuple[Counter, Histogram]] = {}  # `labels` takes 2 µs
        self.duration = Histogram(
            f"{prefix}duration_seconds",
            "Request received to last byte.",
            ["route"],
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        tokens = Counter(f"{prefix}tokens", "Tokens.", ["kind"], registry=registry)
        self.prompt_tokens = tokens.labels("prompt")
        self.cached_tokens = tokens.labels("cached")
        self.output_tokens = tokens.labels("output")
        self.draft_tokens = tokens.labels("accepted_draft")
        self.aborts = Counter(
            f"{prefix}aborts", "Answers ended early by the gateway.", ["reason"], registry=registry
        )
        self.refusals = Counter(
            f"{prefix}refusals", "Requests refused before the engine saw them.", ["reason"], registry=registry
        )
        self.failures = Counter(
            f"{prefix}failures",
            "Answers that failed after they were accepted.",
            ["reason"],
            registry=registry,
        )

    def request(self, route: str, status: int, seconds: float, polled: bool = False) -> None:
        """Count one answered request; `polled`: a health check or the like, not for the status page."""
        children = self._children.get((route, status))
        if children is None:
            children = (self.requests.labels(route, str(status)), self.duration.labels(route))
            self._children[route, status] = children
        children[0].inc()
        children[1].observe(seconds)
        if polled:
            return
        self.totals.requests += 1
        self.totals.refused += status in (429, 503)
        self.totals.failed += status >= 500 and status != 503

    def usage(self, prompt: int, cached: int, output: int) -> None:
        """Count the tokens of one request."""
        self.prompt_tokens.inc(prompt)
        self.cached_tokens.inc(cached)
        self.output_tokens.inc(output)
        self.totals.prompt_tokens += prompt
        self.totals.cached_tokens += cached
        self.totals.output_tokens += output

    def watch(self, active: Callable[[], int], engine: Engine) -> None:
        """Add what is read when scraped."""
        gauge = Gauge("deepinfer_gateway_active_requests", "Requests in work.", registry=self.registry)
        gauge.set_function(active)
        for name in Load.__struct_fields__:
            gauge = Gauge(f"deepinfer_engine_{name}", f"Engine load: {name}.", registry=self.registry)
            gauge.set_function(partial(_read, engine.load, name))
        gauge = Gauge(
            "deepinfer_engine_sink_failures",
            "Deliveries that were lost because their receiver raised; the log has the first one's reason.",
            registry=self.registry,
        )
        gauge.set_function(lambda: engine.health().sink_failures)

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)


def _read(load: Callable[[], Load], name: str) -> float:
    return float(getattr(load(), name))
