"""Counts travel in vLLM's SchedulerStats and come out as increments of `deepinfer_replay_*`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from prometheus_client import REGISTRY
from vllm.v1.metrics.stats import SchedulerStats
from vllm_deepinfer_plugins.replay.counts import ReplayCounts
from vllm_deepinfer_plugins.replay.metrics import SERIES, ReplayCounter
from vllm_deepinfer_plugins.scheduler.stat_logger import StepLogger


def value(name: str, engine: str) -> float:
    return REGISTRY.get_sample_value(f"deepinfer_replay_{name}_total", {"engine": engine}) or 0.0


def test_through_stats_and_back() -> None:
    stats = SchedulerStats()
    before = dict(stats.num_kv_fetch_reqs_by_stage)
    counts = ReplayCounts(1, 2, 3, 4, 5, 6)
    counts.put_into(stats)
    assert ReplayCounts.take_from(stats) == counts
    assert stats.num_kv_fetch_reqs_by_stage == before, "vLLM's own loggers see what they know"
    assert ReplayCounts.take_from(stats) is None


def test_every_count_has_a_series() -> None:
    assert set(SERIES) == {field.name for field in fields(ReplayCounts)}


def test_totals_become_increments() -> None:
    counter = ReplayCounter("counts-1")
    for total in (10, 25, 25):
        stats: Any = SchedulerStats()
        ReplayCounts(replayed_tokens=total, saved=total * 1_000_000).put_into(stats)
        counter.record(stats)
    counter.record(SchedulerStats())
    assert value("replayed_tokens", "counts-1") == 25
    assert value("saved_seconds", "counts-1") == 25.0
    assert value("declined_hits", "counts-1") == 0


def test_the_stat_logger_counts_them() -> None:
    logger = StepLogger(None, engine_index=77)
    stats = SchedulerStats()
    ReplayCounts(trimmed_rows=9, restored_windows=1).put_into(stats)
    logger.record(stats, None)
    assert value("trimmed_rows", "77") == 9 and value("restored_windows", "77") == 1
    assert not any(key.startswith("deepinfer") for key in stats.num_kv_fetch_reqs_by_stage)
