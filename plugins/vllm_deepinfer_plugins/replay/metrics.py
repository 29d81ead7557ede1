"""`deepinfer_replay_*` series in `/metrics`, counted from what arrives with each step's SchedulerStats."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

from prometheus_client import Counter

from .counts import ReplayCounts

SERIES = {
    "replayed_tokens": ("replayed_tokens", "Tokens computed again behind prefix hits."),
    "declined_hits": ("declined_hits", "Prefix hits that were too short to pay."),
    "restored_windows": ("restored_windows", "Prefix hits whose window KV came from host memory."),
    "kept_windows": ("kept_windows", "Window KV that went to host memory."),
    "trimmed_rows": ("trimmed_rows", "Prompt rows that ended at the last KV source."),
    "saved": ("saved_seconds", "Time that adopted prefix hits saved, by the cost model's own estimate."),
}


@cache
def series() -> dict[str, Counter]:
    """One set per process: prometheus_client refuses to register a name twice."""
    return {
        name: Counter(f"deepinfer_replay_{metric}", text, ["engine"])
        for name, (metric, text) in SERIES.items()
    }


class ReplayCounter:
    """Turns totals into increments.

    Args:
        engine: Value of the label.
    """

    def __init__(self, engine: str) -> None:
        self._engine, self._before = engine, ReplayCounts()

    def record(self, stats: Any) -> None:
        """Count what one step's SchedulerStats carry, and take it out of them."""
        counts = ReplayCounts.take_from(stats)
        if counts is None:
            return
        for field in fields(ReplayCounts):
            grown = getattr(counts, field.name) - getattr(self._before, field.name)
            scale = 1e-6 if field.name == "saved" else 1
            series()[field.name].labels(self._engine).inc(max(grown, 0) * scale)
        self._before = counts
