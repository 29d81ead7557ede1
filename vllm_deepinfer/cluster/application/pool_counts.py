"""What one gateway's pools have lived through, as a collector for its metrics registry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .serve_pool import ServePool

EVENTS = (
    "rerouted",
    "continued",
    "not_continued",
    "refusals",
    "calls_lost",
    "not_joined",
    "stale",
    "marked",
    "no_room",
)
"""`PooledEngine.counts`, `ServePool`'s own, and those of the choices (`PoolView.counts`)."""


class PoolCounts(Collector):
    """Args:
    pools: of this gateway, by name.
    """

    def __init__(self, pools: Mapping[str, ServePool]) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        """See prometheus-client."""
        events = CounterMetricFamily(
            "deepinfer_pool_events", "What happened to requests of a pool.", labels=("pool", "event")
        )
        connected = GaugeMetricFamily(
            "deepinfer_pool_connected_replicas", "Replicas that this gateway sends to.", labels=("pool",)
        )
        for name, pool in self._pools.items():
            counts = pool.counts + pool.view.counts
            for event in EVENTS:
                events.add_metric((name, event), counts[event])
            connected.add_metric((name,), len(pool.view.members))
        yield events
        yield connected
