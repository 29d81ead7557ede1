"""What one gateway's pools have lived through, as a collector for its metrics registry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .serve_pool import ServePool

EVENTS = (
    "rerouted",
    "continued",
    "not_continued",
    "refusals",
    "calls_failed",
    "calls_lost",
    "not_joined",
    "stale",
    "marked",
    "no_room",
)
"""`PooledEngine.counts`, `ServePool`'s own, and those of the choices (`PoolView.counts`)."""


HAND_OVERS = (
    "handed_over",
    "direct",
    "prefill_down",
    "lost_prefill",
    "lost_decode",
    "continued",
    "not_continued",
    "waited",
)
"""`DisaggregatedEngine.counts`."""


class PoolCounts(Collector):
    """Args:
    pools: of this gateway, by name.
    hand_overs: counts of its `DisaggregatedEngine`; None with an aggregated pool.
    """

    def __init__(self, pools: Mapping[str, ServePool], hand_overs: Counter[str] | None = None) -> None:
        self._pools, self._hand_overs = pools, hand_overs

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
        if self._hand_overs is not None:
            between = CounterMetricFamily(
                "deepinfer_hand_over_events", "Between prefill and decode pool.", labels=("event",)
            )
            for event in HAND_OVERS:
                between.add_metric((event,), self._hand_overs[event])
            yield between
