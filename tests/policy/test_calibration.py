"""Temperatures, and the text that they are kept in."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.policy.calibration import Calibration, ForeignCalibration, dumps, loads, logit, sigmoid

temperatures = st.lists(st.floats(0.01, 100), min_size=1, max_size=6).map(tuple)
PAIR = ("target-1a2b", "drafter-3c4d")


@given(temperatures, st.text(max_size=12), st.text(max_size=12))
def test_what_is_written_is_read_back(found: tuple[float, ...], target: str, drafter: str) -> None:
    assert loads(dumps(Calibration(found), target, drafter), target, drafter) == Calibration(found)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20), st.floats(0.1, 10))
def test_order_is_kept(confidences: list[float], temperature: float) -> None:
    column = np.sort(np.array(confidences))[:, None]
    calibrated = Calibration((temperature,)).apply(column)[:, 0]
    assert (np.diff(calibrated) >= 0).all() and (calibrated >= 0).all() and (calibrated <= 1).all()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_identity_changes_nothing(confidences: list[float]) -> None:
    column = np.array(confidences)[:, None]
    assert Calibration.identity(1).apply(column) == pytest.approx(column, abs=2e-6)


def test_a_high_temperature_doubts_and_a_low_one_trusts() -> None:
    """Worked example: logit(0.9) = 2.197; halved 0.75, doubled 0.9878."""
    confidences = np.array([[0.9, 0.9, 0.5]])
    assert Calibration((2.0, 0.5, 3.0)).apply(confidences) == pytest.approx(
        np.array([[0.75, 0.9878, 0.5]]), abs=1e-4
    )


def test_what_is_no_number_stays_none() -> None:
    calibrated = Calibration((2.0, 2.0)).apply(np.array([[np.nan, 0.5]]))
    assert np.isnan(calibrated[0, 0]) and calibrated[0, 1] == 0.5


def test_logits_are_finite_at_the_ends() -> None:
    ends = logit(np.array([0.0, 1.0]))
    assert np.isfinite(ends).all() and sigmoid(ends) == pytest.approx([0, 1], abs=2e-6)
    assert sigmoid(np.array([-1e4, 1e4])).tolist() == [0, 1]


@pytest.mark.parametrize("bad", [(), (0.0,), (-1.0,), (float("nan"),), (1.0, float("inf"))])
def test_temperatures_that_are_none(bad: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="finite numbers > 0"):
        Calibration(bad)


def test_another_number_of_positions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"for 2 positions, got 3\."):
        Calibration((1.0, 1.0)).apply(np.ones((1, 3)))


def test_a_foreign_calibration_is_refused_with_a_sentence() -> None:
    text = dumps(Calibration((1.5,)), *PAIR)
    with pytest.raises(ForeignCalibration, match="fitted for target 'target-1a2b', and this is 'other'"):
        loads(text, "other", PAIR[1])
    with pytest.raises(
        ForeignCalibration, match=r"drafter 'drafter-3c4d', and this is 'x': fit one for this pair\."
    ):
        loads(text, PAIR[0], "x")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 2}, "not of format 1"),
        ({"temperatures": None}, "not a list of numbers"),
        ({"temperatures": [1.0, "2"]}, "not a list of numbers"),
        ({"temperatures": [True]}, "not a list of numbers"),
        ({"temperatures": []}, "cannot be used"),
        ({"temperatures": [0]}, "cannot be used"),
        ({"temperatures": [10**400]}, "cannot be used"),
        ({"temperatures": [float("nan")]}, "cannot be used"),
    ],
)
def test_damaged_content(change: dict[str, object], reason: str) -> None:
    content = {**json.loads(dumps(Calibration((1.0,)), *PAIR)), **change}
    with pytest.raises(ForeignCalibration, match=reason):
        loads(json.dumps(content), *PAIR)


@pytest.mark.parametrize(("text", "reason"), [("", "not JSON"), ("{", "not JSON"), ("[]", "not of format 1")])
def test_damaged_text(text: str, reason: str) -> None:
    with pytest.raises(ForeignCalibration, match=reason):
        loads(text, *PAIR)
