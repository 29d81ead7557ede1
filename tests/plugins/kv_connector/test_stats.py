"""Counters on their way to /metrics: merged over workers, exported with their labels."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm_deepinfer_plugins.kv_connector.stats import StoreConnectorStats, StorePromMetrics

from vllm_deepinfer.store.stats import BUCKETS_S, StoreStats


def snapshot(**counters: float) -> dict[str, Any]:
    stats = StoreStats()
    for name, value in counters.items():
        stats.add(name, value, tier="memory")
    stats.observe("seconds", 0.0003, op="get", tier="memory")
    stats.observe("seconds", 99.0, op="get", tier="memory")
    return stats.take()


def test_workers_add_up_and_gauges_are_the_latest() -> None:
    one, two = StoreConnectorStats(data=snapshot(gets=2)), StoreConnectorStats(data=snapshot(gets=3, puts=1))
    one.data["gauges"], two.data["gauges"] = {"load_queue": 4.0, "hung": 1.0}, {"load_queue": 0.0}
    both = one.aggregate(two)
    assert both.reduce() == {"gets{tier=memory}": 5, "puts{tier=memory}": 1}
    assert both.data["gauges"] == {"load_queue": 0.0, "hung": 1.0}
    (row,) = both.data["histograms"].values()
    assert sum(row[:-1]) == 4 and row[-1] == 2 * (0.0003 + 99.0)
    assert not both.is_empty()
    both.reset()
    assert both.is_empty() and StoreConnectorStats(data={"gauges": {"hung": 1}}).is_empty()


def exported(*snapshots: dict[str, Any]) -> dict[str, float]:
    registry = CollectorRegistry()

    kinds: Any = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    metrics = StorePromMetrics(config, kinds, ["model_name"], {0: ["m"]})
    for one in snapshots:
        metrics.observe(one)
    lines = generate_latest(registry).decode().splitlines()
    return {k: float(v) for k, _, v in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_counters_and_histograms_reach_prometheus() -> None:
    found = exported(snapshot(gets=2), snapshot(gets=1))
    assert found['deepinfer_store_gets_total{model_name="m",tier="memory"}'] == 3
    labels = 'model_name="m",op="get",tier="memory"'
    assert found[f"deepinfer_store_seconds_count_total{{{labels}}}"] == 4
    assert found[f"deepinfer_store_seconds_sum_total{{{labels}}}"] == 2 * (0.0003 + 99.0)
    buckets = {
        bound: found[f'deepinfer_store_seconds_bucket_total{{le="{bound}",{labels}}}']
        for bound in [*map(str, BUCKETS_S), "+Inf"]
    }
    assert [buckets[str(b)] for b in BUCKETS_S] == [2.0 if b >= 0.001 else 0.0 for b in BUCKETS_S]
    assert buckets["+Inf"] == 4, "buckets are cumulative"


def test_queue_depths_are_what_they_are_now() -> None:
    found = exported({"gauges": {"load_queue": 4.0, "hung": 1.0}}, {"gauges": {"load_queue": 0.0}})
    assert found['deepinfer_store_load_queue{model_name="m"}'] == 0
    assert found['deepinfer_store_hung{model_name="m"}'] == 1
