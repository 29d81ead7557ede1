"""Figures, from hand-made measurements."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from vllm_deepinfer.bench.report import Report
from vllm_deepinfer.bench.scheduler.cells import Cells
from vllm_deepinfer.bench.scheduler.chart import scatter
from vllm_deepinfer.bench.scheduler.figures import Changing, Measured, bound, figures
from vllm_deepinfer.bench.scheduler.series import charts, series
from vllm_deepinfer.bench.scheduler.settings import Fixed
from vllm_deepinfer.bench.scheduler.traffic import LONG
from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE

CELL = ("dense", "long", 16)

NAMES = [
    "itl_p99_over_target_max",
    "step_p50_over_budget",
    "throughput_ratio_changing",
    "throughput_ratio_tuned_min",
    "throughput_over_bound_min",
    "throughput_ratio_long_16",
    "ttft_p50_ratio",
    "ttft_p99_ratio",
    "cost_model_median_error",
    "cost_model_p95_error",
    "schedule_overhead_ms",
]


def measured() -> Measured:
    cells = Cells()
    cells.add(CELL, "128", None, 4_000, 1.0, [0.05] * 100, [])
    cells.add(CELL, "512", None, 6_000, 1.0, [0.10] * 100, [])
    cells.add(CELL, "as 128", 0.05, 5_200, 1.0, [0.04] * 98 + [0.052] * 2, [0.8, 0.9, 1.0])
    cells.add(CELL, "as 128", 0.05, 5_600, 1.0, [0.04] * 100, [0.9])
    changing = Changing(0.05, [(300, 1.0, [0.05]), (200, 1.0, [0.054])])
    changing.stock = {
        "fast": [(900, 1.0, [0.05]), (300, 1.0, [0.056])],  # breaks the target in its second phase
        "kept": [(150, 1.0, [0.02]), (150, 1.0, [0.05])],
        "slow": [(100, 1.0, [0.02]), (100, 1.0, [0.05])],
    }
    return Measured(
        cells=cells,
        mixes={"dense": {"long": LONG}},
        grid=[Fixed(128), Fixed(512)],
        costs={"dense": TWO_CORE_DENSE},
        errors={"dense": [0.01] * 90 + [0.2] * 10},
        changing=[changing],
        ttft={"ours": [1.0, 1.0, 4.0], "512": [2.0, 2.0, 4.0], "8192": [0.1] * 3, "slow": [3.0] * 3},
        itl={"ours": 0.05, "512": 0.05, "8192": 0.5, "slow": 0.02},
        ttft_target=0.05,
        overhead=([0.0010, 0.0011], [0.00105, 0.00115]),
    )


def value(name: str) -> float | None:
    return {figure.name: figure for figure in figures(measured())}[name].value


def test_every_figure_of_the_issue_is_there_once() -> None:
    assert [figure.name for figure in figures(measured())] == NAMES
    assert all(figure.target for figure in figures(measured()))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("itl_p99_over_target_max", 0.054 / 0.05),  # the second phase of the changing traffic
        ("step_p50_over_budget", 0.9),
        ("throughput_ratio_changing", 500 / 300),
        ("ttft_p50_ratio", 0.5),
        ("ttft_p99_ratio", 1.0),
        ("cost_model_median_error", 0.01),
        ("cost_model_p95_error", 0.2),
        ("schedule_overhead_ms", 0.05),
    ],
)
def test_value(name: str, expected: float) -> None:
    assert value(name) == pytest.approx(expected)


def test_throughput_is_compared_at_the_p99_that_was_measured() -> None:
    """5,400 tokens/s at 40 ms: stock does not go below 50, so there is nothing to divide by."""
    side = measured().cells.sides[CELL]["as 128"]
    assert (side.throughput, side.p99) == (5_400, 0.04)
    assert measured().cells.ratio(CELL, side) is None
    side.periods = [0.05] * 100
    assert measured().cells.ratio(CELL, side) == 5_400 / 4_000
    side.periods = [0.0707106781] * 100
    assert measured().cells.ratio(CELL, side) == pytest.approx(5_400 / 5_000)


def test_at_the_tightest_target_ours_is_compared_with_the_tightest_stock_setting() -> None:
    assert value("throughput_ratio_long_16") == pytest.approx(5_400 / 4_000)


def test_the_bound_of_a_cell() -> None:
    found = bound(measured(), CELL, 0.12)
    assert found is not None and 1.0 < found < 2.0
    assert bound(measured(), ("v41", "long", 16), 0.12) is None


def test_nothing_measured_is_null_with_a_reason() -> None:
    empty = figures(Measured())
    assert [figure.name for figure in empty] == NAMES
    assert all(figure.value is None and figure.reason for figure in empty)


def test_the_report_can_be_written_and_read() -> None:
    whole = measured()
    report = Report(name="scheduler", settings={}, rounds=2, figures=figures(whole), series=series(whole))
    again = Report.model_validate_json(report.model_dump_json())
    assert again.figures == report.figures
    assert {row["setting"] for row in json.loads(report.model_dump_json())["series"]["cells"]} == {
        "128",
        "512",
        "as 128",
    }


def test_charts_are_svg_with_every_point() -> None:
    found = charts(measured())
    assert set(found) == {"dense-long-16", "ttft"}
    root = ElementTree.fromstring(found["dense-long-16"])
    assert len(root.findall("{http://www.w3.org/2000/svg}circle")) == 3


def test_a_chart_of_nothing_and_of_odd_names() -> None:
    ElementTree.fromstring(scatter("empty", "x", "y", {}))
    svg = scatter("<&>", "x", "y", {"a<b": [(1.0, 0.0, "&")]})
    assert ElementTree.fromstring(svg) is not None
