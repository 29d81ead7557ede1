"""LoadRecorder keeps each engine's latest stats and passes on what it was told to."""

from __future__ import annotations

from typing import Any

import pytest

load = pytest.importorskip("vllm_deepinfer_plugins.engine.load")
SchedulerStats = pytest.importorskip("vllm.v1.metrics.stats").SchedulerStats


class Manager:
    """Stands for AsyncLLM's StatLoggerManager."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.logged = 0

    def record(self, *args: Any) -> None:
        self.records.append(args)

    def log(self) -> None:
        self.logged += 1


def stats(running: int, usage: float) -> Any:
    return SchedulerStats(num_running_reqs=running, kv_cache_usage=usage)


def test_nothing_is_known_before_the_first_step() -> None:
    recorder = load.LoadRecorder(Manager(), forward=False)
    assert (recorder.running, recorder.kv_usage) == (0, 0.0)


def test_the_latest_stats_of_each_engine_count() -> None:
    recorder = load.LoadRecorder(Manager(), forward=False)
    recorder.record(stats(9, 0.9), None, engine_idx=0)
    recorder.record(stats(3, 0.5), None, engine_idx=0)
    recorder.record(stats(4, 0.25), None, engine_idx=1)
    recorder.record(None, None, engine_idx=1)  # a message without stats changes nothing
    assert (recorder.running, recorder.kv_usage) == (7, 0.375)


@pytest.mark.parametrize("forward", [True, False])
def test_vllms_own_loggers_are_fed_on_request(forward: bool) -> None:
    manager = Manager()
    recorder = load.LoadRecorder(manager, forward=forward)
    recorder.record(stats(1, 0.1), "iteration", mm_cache_stats=None, engine_idx=0)
    assert len(manager.records) == forward
    recorder.log()
    assert manager.logged == 1, "the rest of the manager's interface is passed through"


def test_no_metrics_stands_in_for_the_prometheus_logger_without_registering_any() -> None:
    registry = pytest.importorskip("prometheus_client").REGISTRY
    before = {metric.name for metric in registry.collect()}
    quiet = load.NoMetrics(vllm_config=None, engine_indexes=[0])
    assert isinstance(quiet, pytest.importorskip("vllm.v1.metrics.loggers").PrometheusStatLogger)
    quiet.record(stats(1, 0.1), None, mm_cache_stats=None, engine_idx=0)
    quiet.log_engine_initialized()
    assert {metric.name for metric in registry.collect()} == before
