"""Acceptance estimated from the past, for drafters that say nothing about themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.policy.calibration_acceptance import CAPACITY, PRIOR, AcceptanceEstimator

DRAFTS = 4


def drive(
    estimator: AcceptanceEstimator, chances: dict[str, float], steps: int, seed: int, verified: int = DRAFTS
) -> None:
    """Every request accepts each draft with its own chance."""
    random = np.random.default_rng(seed)
    keys = list(chances)
    truth = np.array([[chances[key]] for key in keys])
    lengths = np.full(len(keys), verified)
    for _ in range(steps):
        accepts = np.cumprod(random.random((len(keys), DRAFTS)) < truth, axis=1).sum(axis=1)
        estimator.observe(keys, lengths, np.minimum(accepts, verified))


def test_it_begins_with_the_prior() -> None:
    assert AcceptanceEstimator(2).confidences(["a", "b"]) == pytest.approx(np.full((2, 2), PRIOR))
    assert AcceptanceEstimator(1, prior=0.3).confidences(["a"]).tolist() == [[pytest.approx(0.3)]]


def test_requests_are_told_apart() -> None:
    estimator = AcceptanceEstimator(DRAFTS)
    drive(estimator, {"easy": 0.95, "hard": 0.2}, 60, seed=1)
    easy, hard = estimator.confidences(["easy", "hard"])
    assert easy == pytest.approx([0.95] * 4, abs=0.1)
    assert hard[0] == pytest.approx(0.2, abs=0.15) and hard[3] < 0.6


def test_a_new_request_gets_what_all_others_had() -> None:
    estimator = AcceptanceEstimator(DRAFTS)
    drive(estimator, {str(i): 0.8 for i in range(8)}, 80, seed=2)
    new = estimator.confidences(["new"])[0]
    assert new == pytest.approx(estimator.overall) and new == pytest.approx([0.8] * 4, abs=0.06)


def test_one_position_speaks_for_the_others() -> None:
    """Only first drafts of a request verified, all accepted: its deeper ones are believed in more too."""
    estimator = AcceptanceEstimator(DRAFTS)
    drive(estimator, {str(i): 0.5 for i in range(8)}, 60, seed=3)
    usual = estimator.overall.copy()
    for _ in range(20):
        estimator.observe(["lucky"], np.array([1]), np.array([1]))
    lucky = estimator.confidences(["lucky"])[0]
    assert lucky[0] > 0.85 and (lucky[1:] > usual[1:] + 0.2).all()


def test_what_was_not_verified_is_no_rejection() -> None:
    estimator = AcceptanceEstimator(DRAFTS)
    before = estimator.overall.copy()
    for _ in range(50):
        estimator.observe(["a"], np.array([1]), np.array([1]))
        estimator.observe(["b"], np.array([0]), np.array([0]))
    assert estimator.overall[1:] == pytest.approx(before[1:])
    assert estimator.confidences(["b"])[0] == pytest.approx(estimator.overall)


def test_behind_a_rejection_nothing_was_tried() -> None:
    """Rejected at the second of four: one acceptance, one rejection, and two drafts that say nothing."""
    estimator = AcceptanceEstimator(DRAFTS)
    estimator.observe(["a"], np.array([4]), np.array([1]))
    overall = estimator.overall
    assert overall[0] > PRIOR > overall[1]
    assert overall[2:] == pytest.approx([PRIOR] * 2)


def test_it_forgets_what_a_request_was_like() -> None:
    estimator = AcceptanceEstimator(DRAFTS)
    drive(estimator, {"a": 0.95}, 200, seed=4)
    drive(estimator, {"a": 0.1}, 80, seed=5)
    assert estimator.confidences(["a"])[0, 0] < 0.3


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=40))
def test_always_a_probability(rounds: list[tuple[int, int]]) -> None:
    estimator = AcceptanceEstimator(DRAFTS)
    for verified, accepted in rounds:
        estimator.observe(["a"], np.array([verified]), np.array([min(verified, accepted)]))
    found = estimator.confidences(["a", "b"])
    assert (found > 0).all() and (found < 1).all()


def test_an_ended_request_is_forgotten_and_its_place_is_empty() -> None:
    estimator = AcceptanceEstimator(DRAFTS)
    drive(estimator, {"a": 0.99}, 50, seed=6)
    estimator.forget("a")
    estimator.forget("never there")
    estimator.observe(["b"], np.array([0]), np.array([0]))
    assert estimator.confidences(["b"])[0] == pytest.approx(estimator.overall)


def test_the_oldest_goes_where_there_are_too_many() -> None:
    estimator = AcceptanceEstimator(1)
    for _ in range(30):
        estimator.observe(["old", "young"], np.array([1, 1]), np.array([1, 1]))
    many = [f"r{i}" for i in range(CAPACITY - 1)]
    estimator.observe(many, np.zeros(len(many), np.int64), np.zeros(len(many), np.int64))
    old, young = estimator.confidences(["old", "young"])[:, 0]
    assert old == pytest.approx(estimator.overall[0]) and young > old


@pytest.mark.parametrize(("positions", "prior"), [(0, 0.5), (3, 0.0), (3, 1.0)])
def test_bad_settings_are_refused(positions: int, prior: float) -> None:
    with pytest.raises(ValueError, match="prior inside"):
        AcceptanceEstimator(positions, prior)
