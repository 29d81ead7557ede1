"""The table of operators adds up to the time that it explains."""

from __future__ import annotations

import pytest
from vllm_deepinfer_plugins.bench.profiling import profiled, table
from vllm_deepinfer_plugins.bench.workload import Measurement

EVENTS = [("aten::add", 0.1, 5), ("aten::mm", 0.5, 2), ("aten::copy_", 0.05, 9), ("aten::mul", 0.15, 1)]


def test_largest_first_then_the_rest_then_outside() -> None:
    rows = table(EVENTS, seconds=1.0, top=2)
    assert rows == [
        {"operator": "aten::mm", "ms": 500.0, "share": 0.5, "calls": 2},
        {"operator": "aten::mul", "ms": 150.0, "share": 0.15, "calls": 1},
        {"operator": "other operators", "ms": 150.0, "share": 0.15, "calls": 14},
        {"operator": "outside operators", "ms": 200.0, "share": 0.2, "calls": 0},
    ]
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)


def test_operators_on_many_threads_can_exceed_the_time_but_leave_nothing_negative() -> None:
    assert table(EVENTS, seconds=0.5)[-1] == {
        "operator": "outside operators",
        "ms": 0.0,
        "share": 0.0,
        "calls": 0,
    }


def test_profiled_sees_the_timed_part_only() -> None:
    torch = pytest.importorskip("torch")
    matrix = torch.ones(64, 64)

    def measure(timed: object) -> Measurement:
        torch.sin(matrix)
        with timed:  # type: ignore[attr-defined]
            for _ in range(3):
                torch.mm(matrix, matrix)
        return Measurement(tokens=1, seconds=0.5)

    result = profiled(measure)
    calls = {row["operator"]: row["calls"] for row in result["operators"]}
    assert result["seconds"] == 0.5
    assert calls["aten::mm"] == 3 and "aten::sin" not in calls
