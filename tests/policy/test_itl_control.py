"""The budget that keeps a percentile: on noise of several kinds, through drift and stalls."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.policy.itl_control import BOUNDS, FIRST_MARGIN, WINDOW, ItlControl, quantile

TARGET = 0.04


def drive(
    control: ItlControl, period: Callable[[random.Random, float], float], steps: int, seed: int = 0
) -> list[float]:
    """Steps that fill their budget; returns their periods."""
    rng, periods = random.Random(seed), []
    for _ in range(steps):
        budget = control.budget(TARGET)
        seconds = period(rng, budget)
        control.observe(budget, budget, seconds)
        periods.append(seconds)
    return periods


NOISE: dict[str, Callable[[random.Random, float], float]] = {
    "exact": lambda rng, predicted: predicted,
    "lognormal": lambda rng, predicted: predicted * rng.lognormvariate(0, 0.1),
    "biased": lambda rng, predicted: 1.5 * predicted * rng.lognormvariate(0, 0.05),
    "time between steps": lambda rng, predicted: predicted + rng.uniform(0.002, 0.004),
    "heavy tail": lambda rng, predicted: predicted * (rng.paretovariate(8)),
}


@pytest.mark.parametrize("kind", NOISE)
@pytest.mark.parametrize("seed", range(4))
def test_the_measured_percentile_is_within_a_tenth_of_the_target(kind: str, seed: int) -> None:
    control = ItlControl(99.0)
    drive(control, NOISE[kind], 500, seed)
    p99 = quantile(drive(control, NOISE[kind], 4_000, seed + 50), 0.99)
    assert 0.85 * TARGET <= p99 <= 1.1 * TARGET


@pytest.mark.parametrize("percentile", [50.0, 90.0, 95.0])
def test_other_percentiles(percentile: float) -> None:
    control = ItlControl(percentile)
    drive(control, NOISE["lognormal"], 500)
    periods = drive(control, NOISE["lognormal"], 4_000, 9)
    assert quantile(periods, percentile / 100) == pytest.approx(TARGET, rel=0.06)


def test_before_anything_is_measured_it_is_careful() -> None:
    assert ItlControl().budget(TARGET) == pytest.approx(TARGET / FIRST_MARGIN)


def test_one_stall_among_hundreds_changes_little() -> None:
    control = ItlControl()
    drive(control, NOISE["lognormal"], 400)
    before = control.budget(TARGET)
    control.observe(before, before, 5.0)
    drive(control, NOISE["lognormal"], 16, 3)
    assert control.budget(TARGET) == pytest.approx(before, rel=0.1)


def test_after_contention_the_budget_recovers() -> None:
    control = ItlControl()
    drive(control, NOISE["lognormal"], 500)
    before = control.budget(TARGET)
    drive(control, lambda rng, predicted: 3 * NOISE["lognormal"](rng, predicted), 1_000)
    assert control.budget(TARGET) < 0.4 * before
    drive(control, NOISE["lognormal"], WINDOW + 8, 2)
    assert control.budget(TARGET) == pytest.approx(before, rel=0.15)


def test_steps_that_hardly_used_their_budget_say_nothing() -> None:
    control = ItlControl()
    for _ in range(500):
        control.observe(0.004, 0.03, 0.009)
    assert control.margin == FIRST_MARGIN and control.corrections == 0


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1e6)), max_size=60))
def test_the_margin_stays_within_its_bounds(observed: list[tuple[float, float, float]]) -> None:
    control = ItlControl()
    for predicted, budget, period in observed:
        control.observe(predicted, budget, period)
    assert BOUNDS[0] <= control.margin <= BOUNDS[1]


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50), st.floats(0.01, 0.999))
def test_quantile_is_the_smallest_value_that_enough_do_not_exceed(values: list[float], level: float) -> None:
    found = quantile(values, level)
    assert found in values
    assert sum(v <= found for v in values) >= level * len(values) - 1e-9
    smaller = max((v for v in values if v < found), default=None)
    assert smaller is None or sum(v <= smaller for v in values) < level * len(values) + 1e-9


@pytest.mark.parametrize("percentile", [0.0, 100.0, -1.0, float("nan")])
def test_a_percentile_that_is_none(percentile: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 100"):
        ItlControl(percentile)
