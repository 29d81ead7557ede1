"""Figures of a step: through vLLM's own encoding to the other process, and out again into Prometheus."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
from prometheus_client import REGISTRY
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm_deepinfer_plugins.scheduler.complaints import Complaints
from vllm_deepinfer_plugins.scheduler.meter import Finished, Record
from vllm_deepinfer_plugins.scheduler.planner import Planner
from vllm_deepinfer_plugins.scheduler.report import StepReport
from vllm_deepinfer_plugins.scheduler.stat_logger import StepLogger, metrics

from vllm_deepinfer.policy.itl_control import ItlControl
from vllm_deepinfer.policy.prefill_order import Order
from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE, Features
from vllm_deepinfer.policy.step_cost_learner import StepCostLearner

REPORT = StepReport(
    predicted=39_000,
    actual=41_000,
    period=42_000,
    budget=40_000,
    decodes=4,
    error_median=43_000,
    error_p95=120_000,
    margin=1_100_000,
    refits=2,
    corrections=3,
    forced=0,
    ignored_targets=0,
    usable=1,
    chunks=(256, 64),
)


def over_the_wire(stats: SchedulerStats) -> SchedulerStats:
    encoded = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    received = MsgpackDecoder(EngineCoreOutputs).decode(encoded).scheduler_stats
    assert received is not None
    return received


def test_it_survives_the_way_between_the_processes_and_leaves_stock_stats() -> None:
    stats = SchedulerStats(num_running_reqs=3, num_kv_fetch_reqs_by_stage={"in_progress": 2})
    REPORT.put_into(stats)
    received = over_the_wire(stats)
    assert StepReport.take_from(received) == REPORT
    assert received.num_kv_fetch_reqs_by_stage == {"in_progress": 2} and received.num_running_reqs == 3
    assert StepReport.take_from(received) is None


def test_the_open_table_is_still_one_of_integers() -> None:
    """The contract with vLLM 0.32: a declared field that the decoder lets any key into."""
    fields = {f.name: f.type for f in msgspec.inspect.type_info(SchedulerStats).fields}  # type: ignore[attr-defined]
    kind = fields["num_kv_fetch_reqs_by_stage"]
    assert isinstance(kind, msgspec.inspect.DictType)
    assert isinstance(kind.key_type, msgspec.inspect.StrType)
    assert isinstance(kind.value_type, msgspec.inspect.IntType)


def test_of_a_finished_step() -> None:
    learner, control = StepCostLearner(TWO_CORE_DENSE, TWO_CORE_DENSE), ItlControl()
    planner = Planner(learner, control, Order.SHORTEST, 0.04, None, False, 1)
    record = Record(0.0, Features(decodes=1), 0.0075, math.inf, 1, [32], True)
    report = StepReport.of(Finished(record, 0.008, 0.009, False), learner, control, planner)
    assert (report.predicted, report.actual, report.period, report.budget) == (7_500, 8_000, 9_000, 0)
    assert (report.error_median, report.margin, report.usable, report.chunks) == (0, 1_300_000, 1, (32,))


def sample(name: str, engine: str) -> float:
    return REGISTRY.get_sample_value(f"deepinfer_{name}", {"engine": engine}) or 0.0


def test_the_logger_counts_into_prometheus() -> None:
    logger, stats = StepLogger(None, 7), SchedulerStats()
    REPORT.put_into(stats)
    logger.record(stats, None)
    assert stats.num_kv_fetch_reqs_by_stage == {}
    assert sample("steps_over_budget_total", "7") == 1
    assert sample("step_actual_seconds_sum", "7") == 0.041
    assert sample("step_predicted_seconds_sum", "7") == 0.039
    assert sample("step_budget_use_sum", "7") == 41 / 40
    assert sample("step_prefill_tokens_sum", "7") == 320
    assert sample("chunk_tokens_count", "7") == 2
    assert sample("step_cost_error_median", "7") == 0.043
    assert sample("step_cost_error_p95", "7") == 0.12
    assert sample("itl_margin", "7") == 1.1
    assert (sample("step_cost_refits_total", "7"), sample("budget_corrections_total", "7")) == (2, 3)
    replace(REPORT, refits=5, actual=39_000, forced=1).put_into(stats)
    logger.record(stats, None)
    assert sample("step_cost_refits_total", "7") == 5
    assert sample("forced_steps_total", "7") == 1
    assert sample("steps_over_budget_total", "7") == 1


def test_the_logger_leaves_other_schedulers_alone() -> None:
    stats = SchedulerStats(num_kv_fetch_reqs_by_stage={"in_progress": 1})
    StepLogger(None, 8).record(stats, None)
    StepLogger(None, 8).record(None, None)
    assert stats.num_kv_fetch_reqs_by_stage == {"in_progress": 1}
    assert REGISTRY.get_sample_value("deepinfer_step_actual_seconds_count", {"engine": "8"}) is None


def test_one_set_of_series_per_process() -> None:
    assert metrics() is metrics()


def test_complaints_come_every_ten_seconds_and_only_if_there_are_any() -> None:
    complaints = Complaints(40.0)
    complaints.note(REPORT)
    assert complaints.line(0.0) is None and complaints.line(20.0) is None
    for _ in range(100):
        complaints.note(replace(REPORT, period=60_000, forced=2))
    assert complaints.line(25.0) is None  # too early
    assert complaints.line(30.0) == (
        "Time-budget scheduler: 100 % of the steps took over 1.1 x the ITL target; 2 steps went over their "
        "budget because decodes left no room for prefill: raise the target or lower --max-num-seqs."
    )
    complaints.note(replace(REPORT, forced=2))
    assert complaints.line(50.0) is None


def test_other_complaints() -> None:
    complaints = Complaints(None)
    assert complaints.line(0.0) is None
    complaints.note(replace(REPORT, usable=0, ignored_targets=1))
    line = complaints.line(10.0)
    assert line is not None and "no usable cost model yet" in line and "1 targets of requests" in line
    complaints.note(replace(REPORT, error_median=300_000, ignored_targets=1))
    assert complaints.line(20.0) == "Time-budget scheduler: the cost model is off by 30 % (median)."
