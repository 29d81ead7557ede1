"""Figures: median and spread, targets decided by the figure itself, a null value always with its reason."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vllm_deepinfer.bench.figure import Figure


def test_measured_takes_median_and_extremes() -> None:
    figure = Figure.measured("decode_ratio_b1", [1.5, 0.5, 1.0], "ratio", ">= 1.0")
    assert (figure.value, figure.spread, figure.holds, figure.reason) == (1.0, (0.5, 1.5), True, None)


def test_one_round_has_no_spread() -> None:
    assert Figure.measured("seconds", [3.0], "s").spread is None


def test_even_number_of_rounds_takes_the_mean_of_the_middle_two() -> None:
    assert Figure.measured("seconds", [1.0, 2.0, 4.0, 9.0], "s").value == 3.0


@pytest.mark.parametrize(
    ("target", "value", "holds"),
    [
        (">= 1.0", 1.0, True),
        (">= 1.0", 0.999, False),
        ("<= 1e-5", 1e-5, True),
        ("<= 1e-5", 1.1e-5, False),
        ("> 0", 0.0, False),
        ("< 90", 89.9, True),
        ("< 90", 90.0, False),
        ("= -2", -2.0, True),
        (None, 1.0, None),
    ],
)
def test_holds(target: str | None, value: float, holds: bool | None) -> None:
    assert Figure(name="f", value=value, unit="s", target=target).holds is holds


def test_missing_keeps_name_target_and_reason_and_neither_holds_nor_fails() -> None:
    figure = Figure.missing("setup_seconds", "s", "measured by the set-up, not by this command", "< 360")
    assert (figure.value, figure.holds, figure.target) == (None, None, "< 360")
    assert figure.reason == "measured by the set-up, not by this command"


@pytest.mark.parametrize("target", ["1.0", ">=1.0", "at least 1", ">= x", "=> 1", ">= 1.0 s"])
def test_a_target_that_is_no_comparison_is_refused(target: str) -> None:
    with pytest.raises(ValidationError, match="is not a comparison and a number"):
        Figure(name="f", value=1.0, unit="s", target=target)


def test_null_without_reason_and_value_with_reason_are_refused() -> None:
    for value, reason in ((None, None), (1.0, "because")):
        with pytest.raises(ValidationError, match="give a value, or a null value and the reason"):
            Figure(name="f", value=value, unit="s", reason=reason)


def test_null_with_spread_and_value_outside_its_spread_are_refused() -> None:
    with pytest.raises(ValidationError, match="a null value has no spread"):
        Figure(name="f", value=None, unit="s", reason="broken", spread=(1.0, 2.0))
    with pytest.raises(ValidationError, match="lies outside its spread"):
        Figure(name="f", value=3.0, unit="s", spread=(1.0, 2.0))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_json_cannot_hold_is_refused(value: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        Figure(name="f", value=value, unit="s")


@pytest.mark.parametrize("name", ["", "Decode", "decode ratio", "1st"])
def test_names_are_snake_case(name: str) -> None:
    with pytest.raises(ValidationError, match="should match pattern"):
        Figure(name=name, value=1.0, unit="s")


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=9), st.sampled_from([None, ">= 0", "< 3.5"]))
def test_json_gives_the_same_figure_back(rounds: list[float], target: str | None) -> None:
    figure = Figure.measured("f", rounds, "ms", target)
    again = Figure.model_validate_json(figure.model_dump_json())
    assert again == figure
    assert again.holds is figure.holds


def test_holds_cannot_be_claimed_against_the_value() -> None:
    assert (
        Figure.model_validate({"name": "f", "value": 1, "unit": "s", "target": "> 2", "holds": True}).holds
        is False
    )
