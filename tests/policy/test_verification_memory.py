"""Confidences wait until they are old enough; tries of other numbers are paid for first."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_deepinfer.policy.verification import Curve, survival
from vllm_deepinfer.policy.verification_cost import SlotCosts
from vllm_deepinfer.policy.verification_memory import UNSEEN, Delayed, Exploration


def row(*values: float) -> np.ndarray:
    return np.array([values])


def test_confidences_of_two_steps_ago() -> None:
    delayed = Delayed(2)
    seen = []
    for value in (0.1, 0.2, 0.3, 0.4):
        delayed.push(["a"], row(value))
        old = delayed.of(["a"])
        seen.append(None if old is None else old.item())
    assert seen == [None, None, 0.1, 0.2]


def test_without_delay_they_are_those_of_now() -> None:
    delayed = Delayed(0)
    delayed.push(["a", "b"], np.array([[0.1], [0.7]]))
    found = delayed.of(["b", "a"])
    assert found is not None and found.tolist() == [[0.7], [0.1]]


def test_requests_are_found_wherever_they_stand_and_new_ones_get_the_mean() -> None:
    delayed = Delayed(1)
    delayed.push(["a", "b"], np.array([[0.2, 0.4], [0.6, np.nan]]))
    delayed.push(["b", "c"], np.array([[0.0, 0.0], [0.0, 0.0]]))
    found = delayed.of(["c", "b", "a"])
    assert found is not None
    assert found == pytest.approx(np.array([[0.4, 0.4], [0.6, 0.4], [0.2, 0.4]]))


def test_the_mean_never_holds_what_is_too_new() -> None:
    """Else a request's own drafts would reach its budget by way of the mean."""
    delayed = Delayed(1)
    delayed.push(["a"], row(0.5))
    for value in (0.0, 1.0, 0.3):
        before = Delayed(1)
        before.push(["a"], row(0.5))
        before.push(["a"], row(value))
        found = before.of(["new"])
        assert found is not None and found.item() == 0.5


def test_a_position_that_nobody_drafted() -> None:
    delayed = Delayed(0)
    delayed.push(["a"], row(0.9, np.nan))
    found = delayed.of(["a"])
    assert found is not None and found.tolist() == [[0.9, UNSEEN]]


def test_steps_without_requests_and_of_another_width() -> None:
    delayed = Delayed(1)
    delayed.push(["a"], row(0.4))
    delayed.push([], np.zeros((0, 1)))
    assert delayed.of(["a"]) is not None
    delayed.push(["b"], row(0.8))
    found = delayed.of(["b"])
    assert found is not None and found.item() == pytest.approx(0.4)
    delayed.push(["b"], row(0.8, 0.8))
    assert delayed.of(["b"]) is None


def test_a_negative_delay_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0 steps, got -1"):
        Delayed(-1)


def flat_curve(drafts: int = 4, per_draft: float = 0.2, confidence: float = 0.6) -> Curve:
    costs = SlotCosts(1.0 + per_draft * np.arange(drafts + 1, dtype=np.float64), np.zeros((1, drafts)))
    return Curve.of(survival(np.full((1, drafts), confidence), np.array([drafts])), costs, 1.0)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.05])
def test_all_tries_together_lose_no_more_than_their_share(share: float) -> None:
    """3 000 steps: every level gets its turn, and what they lose stays within the share of the time."""
    curve, exploration, drafted = flat_curve(), Exploration(share, 1), np.array([4])
    lost = spent = 0.0
    tried = set()
    for _ in range(3_000):
        number = exploration.slots(curve.best, curve, drafted, np.inf)
        taken = curve.best if number is None else number
        spent += float(curve.seconds[taken])
        lost += float(curve.seconds[taken] * (1 - curve.rates[taken] / curve.price))
        tried |= {number} - {None}
    assert lost <= share * spent * (1 + 1e-9) + float(curve.seconds.max()) * share
    assert tried == {0, 1, 2, 3, 4} - {curve.best}


def test_tries_keep_their_distance_even_where_they_cost_nothing() -> None:
    costs = SlotCosts(np.ones(3), np.zeros((1, 2)))
    curve = Curve.of(np.array([[1e-9, 1e-9]]), costs, 1.0)
    exploration = Exploration(0.01, 10)
    steps = [i for i in range(100) if exploration.slots(2, curve, np.array([2]), np.inf) is not None]
    assert len(steps) >= 5 and min(np.diff(steps)) >= 10


def test_no_try_goes_over_the_limit_and_none_is_made_without_a_share() -> None:
    curve = flat_curve()
    exploration, none = Exploration(0.9, 1), Exploration(0.0, 1)
    for _ in range(50):
        tried = exploration.slots(curve.best, curve, np.array([4]), 1.3)
        assert tried is None or curve.seconds[tried] <= 1.3
        assert none.slots(curve.best, curve, np.array([4]), np.inf) is None


@pytest.mark.parametrize(("share", "every"), [(-0.1, 1), (1.0, 1), (0.1, 0), (float("nan"), 1)])
def test_bad_settings_are_refused(share: float, every: int) -> None:
    with pytest.raises(ValueError, match="share in"):
        Exploration(share, every)
