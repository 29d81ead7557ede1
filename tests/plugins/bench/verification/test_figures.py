"""Figures from rates that are made up."""

from __future__ import annotations

import pytest
from vllm_deepinfer_plugins.bench.verification.figures import (
    TARGETS,
    Measured,
    charts,
    geomean,
    other_figures,
    series,
    sweep_figures,
)
from vllm_deepinfer_plugins.bench.verification.plan import ADAPTIVE, FIXED, OFF, TOO_SURE

RATES = {OFF: 50.0, "fixed 1": 80.0, "fixed 2": 90.0, "fixed 3": 100.0, "fixed 4": 95.0, "fixed 5": 60.0}


def measured() -> Measured:
    """Two cells of two rounds; the second round runs at half the speed."""
    found = Measured()
    for cell, ours in ((("easy", 1), 99.0), (("hard", 64), 110.0)):
        for speed in (1.0, 0.5):
            for name, rate in {**RATES, ADAPTIVE: ours}.items():
                found.add(cell, name, speed * rate, 0.01)
    found.add(("hard", 64), TOO_SURE, 90.0, None)
    found.add(("hard", 64), TOO_SURE, 45.0, 0.5)
    return found


def test_pairs_are_of_the_same_round() -> None:
    """A machine that slows down between rounds changes nothing."""
    found = measured()
    assert found.ratio(("easy", 1), ADAPTIVE, "fixed 5") == pytest.approx(99 / 60)
    assert found.over_best(("easy", 1)) == pytest.approx(0.99)
    assert found.over_best(("hard", 64)) == pytest.approx(1.10)
    assert found.cells(TOO_SURE) == [("hard", 64)]
    assert max(found.foreign) == 0.5


def test_the_figures() -> None:
    figures = {figure.name: figure for figure in sweep_figures(measured())}
    least = figures["adaptive_over_best_fixed_min"]
    assert least.value == pytest.approx(0.99) and least.spread == pytest.approx((0.99, 1.10)) and least.holds
    assert figures["adaptive_over_fixed5_geomean"].value == pytest.approx(geomean([99 / 60, 110 / 60]))
    assert figures["adaptive_over_off_min"].value == pytest.approx(99 / 50)
    assert figures["adaptive_over_best_fixed_min_too_sure"].value == pytest.approx(0.9)
    assert "adaptive_over_best_fixed_min_no_confidences" not in figures


def test_the_other_figures_and_that_every_target_has_one() -> None:
    others = other_figures([1.0, 0.98], [0.2, 0.25, 0.9], {0: 0.2, 1: 0.3}, {0: 0.01, 1: 0.03, 2: 0.005})
    figures = {figure.name: figure for figure in others}
    assert (
        figures["scripted_over_optimum_min"].value == 0.98 and not figures["scripted_over_optimum_min"].holds
    )
    assert figures["decision_ms_256x5"].value == 0.25 and figures["decision_ms_256x5"].holds
    after = figures["survival_ece_after"]
    assert after.value == 0.01 and after.spread == (0.005, 0.03) and after.holds
    assert figures["survival_ece_before"].value == 0.2
    assert set(TARGETS) <= set(figures) | {figure.name for figure in sweep_figures(measured())}


def test_series_and_charts() -> None:
    easy, hard = series(measured())
    assert easy["tokens_per_second"][ADAPTIVE] == 74.2 and easy["rounds"][OFF] == [50.0, 25.0]
    assert (hard["traffic"], hard["concurrency"], hard["over_best_fixed"]) == ("hard", 64, 1.1)
    drawn = charts(measured())
    assert set(drawn) == {"easy", "hard"}
    for chart in drawn.values():
        assert chart.startswith("<svg") and chart.count("<circle") in (len(FIXED) + 2, len(FIXED) + 3)
        assert ">fixed<" in chart and ">5<" in chart
