"""Temperatures from rounds: known truth is found again, and a fit is never worse than none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policy.calibration_traffic import verified_rounds
from vllm_deepinfer.policy.calibration import Calibration
from vllm_deepinfer.policy.calibration_errors import Records, ece, errors
from vllm_deepinfer.policy.calibration_fit import GRID, LEAST_ROUNDS, better, cross_fit, fit


@pytest.mark.parametrize("heat", [0.6, 1.6, 2.5])
def test_a_drafter_that_is_too_sure_or_not_sure_enough(heat: float) -> None:
    """Fitted on one half of the traffic, judged on the other: the survival's ECE is at most 2 %."""
    found = fit(verified_rounds(8_000, heat, seed=1))
    assert found.calibration.temperatures[:3] == pytest.approx((heat,) * 3, rel=0.25)
    held_out = verified_rounds(8_000, heat, seed=2)
    before = errors(held_out.confidences, held_out)
    after = errors(found.calibration.apply(held_out.confidences), held_out)
    assert before.mean_survival > 0.05
    assert after.mean_survival < 0.02 and after.mean_survival < before.mean_survival / 2


def test_it_is_found_from_rounds_that_were_cut() -> None:
    """Rejections are known of all depths, acceptances only of the verified: a naive count misleads."""
    found = fit(verified_rounds(20_000, 1.6, seed=3, cut=0.4))
    full = verified_rounds(10_000, 1.6, seed=4)
    after = errors(found.calibration.apply(full.confidences), full)
    assert found.calibration.temperatures[0] == pytest.approx(1.6, rel=0.2)
    assert after.mean_survival < 0.035 < errors(full.confidences, full).mean_survival


def test_the_first_position_gets_the_best_of_the_grid() -> None:
    records = verified_rounds(2_000, 1.8, seed=5, positions=1)
    best = min(
        ece(Calibration((each,)).apply(records.confidences)[:, 0], records.survived[:, 0]) for each in GRID
    )
    assert fit(records).after.survival[0] == pytest.approx(best, abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.5, 3), st.integers(0, 600), st.floats(0, 0.6))
def test_never_worse_than_before_on_what_it_was_fitted_to(
    seed: int, heat: float, count: int, cut: float
) -> None:
    records = verified_rounds(count, heat, seed, cut, positions=3)
    found = fit(records, grid=(0.5, 0.8, 1.25, 2.0))
    assert found.after.mean_survival <= found.before.mean_survival
    assert found.after.worst_survival <= found.before.worst_survival
    applied = errors(found.calibration.apply(records.confidences), records)
    assert applied.mean_survival == pytest.approx(found.after.mean_survival, abs=1e-3)


def test_what_helps_nobody_is_not_kept() -> None:
    records = verified_rounds(4_000, 1.0, seed=6)
    kept = better(Calibration((3.0,) * 5), records, errors(records.confidences, records))
    assert kept.calibration == Calibration.identity(5) and kept.after == kept.before


def test_of_equal_temperatures_the_one_nearest_to_1_is_taken() -> None:
    """All confidences 0.5: every temperature gives the same."""
    records = Records(np.full((300, 2), 0.5), np.full(300, 2), np.tile([0, 1, 2], 100))
    assert fit(records).calibration == Calibration.identity(2)


def test_a_position_that_was_hardly_verified_keeps_what_it_had() -> None:
    rounds = verified_rounds(LEAST_ROUNDS * 4, 2.0, seed=7, positions=2)
    rare = Records(rounds.confidences, np.where(np.arange(800) < 199, 2, 1), np.minimum(rounds.accepted, 1))
    near = fit(rare, near=Calibration((1.9, 0.7)), grid=(0.9, 1.0, 1.1)).calibration.temperatures
    assert near[1] in (0.7, 1.0) and near[0] in (
        pytest.approx(1.9),
        pytest.approx(2.09),
        pytest.approx(1.71),
        1.0,
    )
    assert fit(rare).calibration.temperatures[1] == 1.0


def test_nothing_gives_the_identity() -> None:
    empty = Records(np.zeros((0, 3)), np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert fit(empty).calibration == Calibration.identity(3)


def test_one_half_fits_and_the_other_judges() -> None:
    fitting, judging = verified_rounds(8_000, 1.8, seed=21), verified_rounds(8_000, 1.8, seed=22)
    found = cross_fit(fitting, judging)
    assert found.calibration == fit(fitting).calibration
    assert found.before == errors(judging.confidences, judging)
    assert found.after == errors(found.calibration.apply(judging.confidences), judging)
    assert found.after.mean_survival < 0.02 < found.before.mean_survival


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.4, 3), st.floats(0.4, 3))
def test_never_worse_on_what_judges_though_it_be_other_traffic(seed: int, one: float, other: float) -> None:
    judging = verified_rounds(400, other, seed + 1, positions=2)
    found = cross_fit(verified_rounds(400, one, seed, positions=2), judging)
    assert found.after.mean_survival <= found.before.mean_survival
    assert found.after.worst_survival <= found.before.worst_survival
    if found.calibration == Calibration.identity(2):
        assert found.after == found.before
