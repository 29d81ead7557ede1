"""`deepinfer_` metrics in vLLM's `/metrics`: a stat logger, which AsyncLLM loads and calls once per step."""

from __future__ import annotations

from functools import cache
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.v1.metrics.loggers import StatLoggerBase

from ..replay.metrics import ReplayCounter
from ..verification.metrics import VerificationCounter
from .report import StepReport

SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.25, 0.5, 1.0, 2.0, 5.0)
SHARES = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)
TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class Metrics:
    """The series, each with the label `engine`."""

    def __init__(self) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"deepinfer_{name}", text, ["engine"], buckets=buckets)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"deepinfer_{name}", text, ["engine"])

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"deepinfer_{name}", text, ["engine"], multiprocess_mode="mostrecent")

        self.predicted = histogram("step_predicted_seconds", "Predicted duration of a step.", SECONDS)
        self.actual = histogram("step_actual_seconds", "Measured duration of a step.", SECONDS)
        self.use = histogram("step_budget_use", "Measured duration over budget.", SHARES)
        self.chunk = histogram("chunk_tokens", "Prefill tokens of one request in one step.", TOKENS)
        self.prefill = histogram("step_prefill_tokens", "Prefill tokens of a step.", TOKENS)
        self.over = counter("steps_over_budget", "Steps that took longer than their budget.")
        self.forced = counter("forced_steps", "Steps that were given a chunk although no room was left.")
        self.corrections = counter("budget_corrections", "Corrections of target over budget by over 1 %.")
        self.refits = counter("step_cost_refits", "Fits of the cost model.")
        self.ignored = counter("ignored_targets", "Targets of requests that are no positive numbers.")
        self.error = gauge("step_cost_error_median", "Median of |predicted - actual| / actual.")
        self.error_p95 = gauge("step_cost_error_p95", "95th percentile of |predicted - actual| / actual.")
        self.margin = gauge("itl_margin", "ITL target over step budget.")
        self.usable = gauge("step_cost_usable", "1 while there is a usable cost model.")


@cache
def metrics() -> Metrics:
    """One set per process: prometheus_client refuses to register a name twice."""
    return Metrics()


class StepLogger(StatLoggerBase):
    """Takes our entries out of each step's SchedulerStats and counts them. Without any it does nothing."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._engine = str(engine_index)
        self._before: StepReport | None = None
        self._replays = ReplayCounter(self._engine)
        self._verification = VerificationCounter(self._engine)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        report = None
        if scheduler_stats is not None:
            self._replays.record(scheduler_stats)
            self._verification.record(scheduler_stats)
            report = StepReport.take_from(scheduler_stats)
        if report is not None:
            self._count(metrics(), report)
            self._before = report

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def _count(self, series: Metrics, report: StepReport) -> None:
        engine, before = self._engine, self._before
        series.actual.labels(engine).observe(report.actual / 1e6)
        if report.predicted:
            series.predicted.labels(engine).observe(report.predicted / 1e6)
        if report.budget:
            series.over.labels(engine).inc(report.actual > report.budget)
            if report.chunks:
                series.use.labels(engine).observe(report.actual / report.budget)
        for chunk in report.chunks:
            series.chunk.labels(engine).observe(chunk)
        if report.chunks:
            series.prefill.labels(engine).observe(sum(report.chunks))
        for name in ("forced", "corrections", "refits"):
            total = getattr(report, name)
            getattr(series, name).labels(engine).inc(total - (getattr(before, name) if before else 0))
        series.ignored.labels(engine).inc(report.ignored_targets - (before.ignored_targets if before else 0))
        series.error.labels(engine).set(report.error_median / 1e6)
        series.error_p95.labels(engine).set(report.error_p95 / 1e6)
        series.margin.labels(engine).set(report.margin / 1e6)
        series.usable.labels(engine).set(report.usable)
