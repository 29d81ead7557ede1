"""The store's counters on vLLM's way to `/metrics` and to its log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from vllm_deepinfer.store.stats import BUCKETS_S, label, merge, parse

PREFIX = "deepinfer_store_"


@dataclass
class StoreConnectorStats(KVConnectorStats):
    """A snapshot of `StoreStats`, and gauges that say how things are now."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        merged = merge(self.data, other.data)
        merged["gauges"] = {**self.data.get("gauges", {}), **other.data.get("gauges", {})}
        return StoreConnectorStats(data=merged)

    def reduce(self) -> dict[str, int | float]:
        """What the periodic log line shows: every counter of the interval."""
        counters: Mapping[str, float] = self.data.get("counters", {})
        return {name: round(value, 3) for name, value in sorted(counters.items())}

    def is_empty(self) -> bool:
        return not (self.data.get("counters") or self.data.get("histograms"))


class StorePromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics `deepinfer_store_*`, made when they first occur.

    Counters carry the labels of their name. A latency histogram comes as vLLM's snapshot of bucket counts, so
    it is exported as the counters `…_bucket{le=…}`, `…_count` and `…_sum` that a histogram consists of.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counter, self._gauge = metric_types[Counter], metric_types[Gauge]
        self._made: dict[str, Any] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for text, value in transfer_stats_data.get("counters", {}).items():
            name, labels = parse(text)
            self._add(name, labels, value, engine_idx)
        for text, row in transfer_stats_data.get("histograms", {}).items():
            name, labels = parse(text)
            total = 0.0
            for bound, count in zip([*map(str, BUCKETS_S), "+Inf"], row[:-1], strict=True):
                total += count
                self._add(f"{name}_bucket", {**labels, "le": bound}, total, engine_idx)
            self._add(f"{name}_count", labels, total, engine_idx)
            self._add(f"{name}_sum", labels, row[-1], engine_idx)

        for name, value in transfer_stats_data.get("gauges", {}).items():
            self._labelled(name, {}, engine_idx, self._gauge, multiprocess_mode="mostrecent").set(value)

    def _add(self, name: str, labels: Mapping[str, str], value: float, engine: int) -> None:
        self._labelled(name, labels, engine, self._counter).inc(value)

    def _labelled(self, name: str, labels: Mapping[str, str], engine: int, kind: Any, **more: Any) -> Any:
        key = label(name, **dict.fromkeys(labels, ""))
        metric = self._made.get(key)
        names = sorted(labels)
        if metric is None:
            metric = self._made[key] = kind(
                name=PREFIX + name,
                documentation=f"prefix store: {name.replace('_', ' ')}; see vllm_deepinfer/store/README.md",
                labelnames=[*self._labelnames, *names],
                **more,
            )
        values = [*self.per_engine_labelvalues[engine], *(labels[n] for n in names)]
        return metric.labels(*map(str, values))
