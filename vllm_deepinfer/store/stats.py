"""Counters and latency histograms of a store, as plain numbers that can be added up over processes.

    counters    "hit_runs", "miss_runs", "get_bytes{tier=memory}", "evicted_bytes{reason=pressure}"
    histograms  "seconds{op=get,tier=directory}": counts per bucket of `BUCKETS_S`, one above, then the sum

The library has no exporter of its own here: the gateway's and vLLM's `/metrics` both take a snapshot.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

BUCKETS_S = (0.00001, 0.00005, 0.0002, 0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0)

Snapshot = dict[str, Any]


def label(name: str, **labels: str) -> str:
    """The text form of a name with labels."""
    return f"{name}{{{','.join(f'{k}={v}' for k, v in sorted(labels.items()))}}}" if labels else name


def parse(text: str) -> tuple[str, dict[str, str]]:
    """Undo `label`."""
    name, _, rest = text.partition("{")
    pairs = (pair.partition("=") for pair in rest[:-1].split(",") if pair)
    return name, {key: value for key, _, value in pairs}


class StoreStats:
    """Thread-safe; `take` gives what happened since the last `take`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[str, float] = {}
        self._histograms: dict[str, list[float]] = {}

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Count."""
        text = label(name, **labels)
        with self._lock:
            self._counters[text] = self._counters.get(text, 0.0) + value

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Put a duration into its histogram."""
        text = label(name, **labels)
        with self._lock:
            row = self._histograms.setdefault(text, [0.0] * (len(BUCKETS_S) + 2))
            row[bisect_left(BUCKETS_S, seconds)] += 1
            row[-1] += seconds

    def get(self, name: str, **labels: str) -> float:
        """A counter's value since the last `take`."""
        with self._lock:
            return self._counters.get(label(name, **labels), 0.0)

    def take(self) -> Snapshot:
        """Counters and histograms since the last call, as JSON."""
        with self._lock:
            counters, self._counters = self._counters, {}
            histograms, self._histograms = self._histograms, {}
        return {"counters": counters, "histograms": histograms}


def merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> Snapshot:
    """Two snapshots added up."""
    counters = dict(first.get("counters", {}))
    for name, value in second.get("counters", {}).items():
        counters[name] = counters.get(name, 0.0) + value
    histograms = {name: list(row) for name, row in first.get("histograms", {}).items()}
    for name, row in second.get("histograms", {}).items():
        old = histograms.get(name)
        histograms[name] = list(row) if old is None else [a + b for a, b in zip(old, row, strict=True)]
    return {"counters": counters, "histograms": histograms}
