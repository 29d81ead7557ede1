"""The scheduler's own numbers, which AsyncLLM reports once per step to its loggers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import SchedulerStats


class NoMetrics(PrometheusStatLogger):
    """Keeps AsyncLLM from registering `vllm:` metrics that nothing would ever count.

    A custom logger is also what makes the scheduler report its stats at all.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        """Registers nothing."""

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Counts nothing."""

    def log_engine_initialized(self) -> None:
        """Says nothing."""


class LoadRecorder:
    """Stands where AsyncLLM has its StatLoggerManager: keeps the latest SchedulerStats of each engine.

    vLLM's own loggers are a Prometheus observation per token and stream, so they are passed on only if
    asked for.

    Attributes:
        latest: engine index to its latest stats.
    """

    def __init__(
        self,
        loggers: Any,
        forward: bool,
        on_hand_over: Callable[[Mapping[str, Any]], None] = lambda events: None,
    ) -> None:
        """
        Args:
            loggers: the StatLoggerManager that AsyncLLM made. forward: keep it at work.
            on_hand_over: called with the KV connector's stats of a step that has any.
        """
        self.latest: dict[int, SchedulerStats] = {}
        self._loggers = loggers
        self._forward = forward
        self._on_hand_over = on_hand_over

    @property
    def running(self) -> int:
        """Requests that run, over all engines."""
        return sum(stats.num_running_reqs for stats in self.latest.values())

    @property
    def kv_usage(self) -> float:
        """Fraction of the KV capacity in use, the mean over engines of equal size."""
        return sum(stats.kv_cache_usage for stats in self.latest.values()) / (len(self.latest) or 1)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int | None = None,
    ) -> None:
        """Called by AsyncLLM's output handler at the end of every step."""
        if scheduler_stats is not None:
            self.latest[engine_idx or 0] = scheduler_stats
            if scheduler_stats.kv_connector_stats:
                stats = scheduler_stats.kv_connector_stats
                self._on_hand_over(stats.get("NixlConnector", stats))  # one of several in a MultiConnector
        if self._forward:
            self._loggers.record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

    def __getattr__(self, name: str) -> Any:
        # the rest of the manager's interface is rare and not ours: log, sleep state, rejections
        return getattr(self._loggers, name)
