"""Counts, their way through vLLM's SchedulerStats, and the series."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import REGISTRY
from vllm_deepinfer_plugins.verification.counts import VerificationCounts, reached
from vllm_deepinfer_plugins.verification.metrics import VerificationCounter

from vllm_deepinfer.policy.verification_control import Decision, Reason


def counts() -> VerificationCounts:
    made = VerificationCounts()
    decision = Decision(np.array([2, 0]), Reason.SCHEDULED, tokens=3.0, seconds=0.010, gain=1.5)
    made.decided(decision, [3, 1])
    made.measured(decision, tokens=4, seconds=0.012)
    made.add_lengths("verified", [2, 0])
    made.add_lengths("accepted", [1, 0])
    made.positions["ece_before", 0] = 250_000
    return made


@pytest.mark.parametrize(
    ("lengths", "expected"), [([], []), ([0, 0], []), ([3, 1], [2, 1, 1]), ([2], [1, 1])]
)
def test_reached(lengths: list[int], expected: list[int]) -> None:
    assert reached(lengths) == expected


def test_what_is_counted() -> None:
    made = counts()
    assert made.positions["drafted", 0] == 2 and made.positions["drafted", 2] == 1
    assert made.totals["tokens"] == 4 and made.totals["tokens_predicted"] == 3
    assert made.totals["us_actual"] == 12_000 and made.totals["us_predicted"] == 10_000
    assert made.totals["us_everything"] == 20_000  # 4 tokens at 3 / 0.010 / 1.5 = 200 tokens per second


def test_a_decision_without_a_prediction_has_no_gain() -> None:
    made = VerificationCounts()
    made.measured(Decision(np.array([2]), Reason.NO_COST), tokens=4, seconds=0.012)
    assert made.totals == {}


def test_there_and_back_leaves_vllm_s_own_stages() -> None:
    stats = SimpleNamespace(num_kv_fetch_reqs_by_stage={"local": 3})
    counts().put_into(stats)
    assert VerificationCounts.take_from(stats) == counts()
    assert stats.num_kv_fetch_reqs_by_stage == {"local": 3}
    assert VerificationCounts.take_from(stats) is None


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"deepinfer_verification_{name}", {"engine": "v7", **labels}) or 0.0


def test_series_grow_by_what_is_new() -> None:
    counter = VerificationCounter("v7")
    for expected in (1, 2):
        stats = SimpleNamespace(num_kv_fetch_reqs_by_stage={})
        made = counts()
        made.totals["steps:scheduled"] = expected
        made.positions["accepted", 0] = 5 * expected
        made.put_into(stats)
        counter.record(stats)
        assert value("steps_total", reason="scheduled") == expected
        assert value("accepted_total", position="0") == 5 * expected
    assert value("seconds_total") == pytest.approx(0.012)
    assert value("ece_before", position="0") == 0.25
