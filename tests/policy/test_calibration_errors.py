"""Errors of confidences: worked by hand, and with what was not verified left out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.policy.calibration_traffic import verified_rounds
from vllm_deepinfer.policy.calibration import Vector
from vllm_deepinfer.policy.calibration_errors import BINS, Records, ece, errors


def naive_ece(predicted: Vector, happened: list[bool]) -> float:
    """Bin by bin, as it is defined."""
    total = 0.0
    for number in range(BINS):
        inside = [i for i, p in enumerate(predicted) if min(int(p * BINS), BINS - 1) == number]
        if inside:
            confidence = sum(predicted[i] for i in inside) / len(inside)
            frequency = sum(happened[i] for i in inside) / len(inside)
            total += len(inside) / len(predicted) * abs(confidence - frequency)
    return total


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60))
def test_ece_is_its_definition(samples: list[tuple[float, bool]]) -> None:
    predicted = np.array([p for p, _ in samples])
    happened = [h for _, h in samples]
    assert ece(predicted, np.array(happened)) == pytest.approx(naive_ece(predicted, happened), abs=1e-12)


def test_ece_of_nothing_is_not_a_number() -> None:
    assert np.isnan(ece(np.zeros(0), np.zeros(0, np.bool_)))


def test_a_worked_example() -> None:
    """Four rounds of two drafts, confidences 0.8 and 0.5; the last round verified only the first."""
    records = Records(np.tile([0.8, 0.5], (4, 1)), np.array([2, 2, 2, 1]), np.array([2, 1, 0, 1]))
    found = errors(records.confidences, records)
    assert found.counts == (4, 3)
    assert found.position == pytest.approx((abs(0.8 - 3 / 4), abs(0.5 - 1 / 2)))
    assert found.survival == pytest.approx((abs(0.8 - 3 / 4), abs(0.4 - 1 / 3)))
    assert found.mean_survival == pytest.approx((4 * 0.05 + 3 * (0.4 - 1 / 3)) / 7)
    assert found.worst_survival == pytest.approx(0.4 - 1 / 3)


@given(
    arrays.arrays(np.float64, (12, 3), elements=st.floats(0, 1)),
    st.lists(st.integers(0, 2), min_size=12, max_size=12),
    st.data(),
)
def test_what_was_not_verified_says_nothing(
    confidences: Vector, lengths: list[int], data: st.DataObject
) -> None:
    """Whatever stands behind the verified drafts, a NaN included, the errors are the same."""
    verified = np.array(lengths)
    accepted = np.array([data.draw(st.integers(0, n)) for n in lengths])
    records = Records(confidences, verified, accepted)
    changed = np.where(records.reached, confidences, np.nan)
    before, after = errors(confidences, records), errors(changed, Records(changed, verified, accepted))
    assert np.array_equal(before.survival, after.survival, equal_nan=True)
    assert np.array_equal(before.position, after.position, equal_nan=True)
    assert before.counts == after.counts and np.isnan(before.survival[2])


def test_true_confidences_stay_true_however_verification_is_cut() -> None:
    """What censoring is for. With rejections in cut rounds counted as failures of all behind, it is not."""
    records = verified_rounds(40_000, heat=1.0, seed=1, cut=0.5)
    found = errors(records.confidences, records)
    assert max(found.survival) < 0.03 and max(found.position) < 0.03  # sampling alone: 0.02 of 1 863
    naive = np.prod(records.confidences, axis=1, dtype=np.float64)
    known = records.reached[:, 4] | (records.accepted < records.verified)
    assert ece(naive[known], records.survived[known, 4]) > 0.04


def test_rounds_without_numbers_are_left_out() -> None:
    records = Records(
        np.array([[np.nan, 0.5], [0.5, np.nan], [0.5, 0.5]]), np.array([1, 1, 2]), np.zeros(3, np.int64)
    )
    assert records.usable().verified.tolist() == [1, 2]


def test_without_rounds_there_is_no_error() -> None:
    records = Records(np.zeros((0, 2)), np.zeros(0, np.int64), np.zeros(0, np.int64))
    found = errors(records.confidences, records)
    assert found.mean_survival == found.worst_survival == 0.0 and found.counts == (0, 0)


@pytest.mark.parametrize(("verified", "accepted"), [([2], [3]), ([3], [1]), ([1], [-1])])
def test_impossible_counts_are_refused(verified: list[int], accepted: list[int]) -> None:
    with pytest.raises(ValueError, match="accepts from 0 to all"):
        Records(np.ones((1, 2)), np.array(verified), np.array(accepted))


def test_counts_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="1 rounds of confidences need as many counts"):
        Records(np.ones((1, 2)), np.array([1, 1]), np.array([1, 1]))
