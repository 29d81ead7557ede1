"""Scripts: the same everywhere, as likely as they say, and the same token for everybody who comes to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_deepinfer_plugins.bench.verification.script import HEAT, Confidences, Scripts, said

from vllm_deepinfer.policy.calibration import Calibration, sigmoid


def at(count: int) -> np.ndarray:
    return np.arange(count)


def test_drafts_are_right_as_often_as_their_chances_say() -> None:
    scripts = Scripts.of("mixed", 50, seed=3)
    numbers = np.repeat(at(50), 400)
    known = np.tile(np.arange(400) * 5, 50)  # no place twice
    chances, right = scripts.chances(numbers, known, 5), scripts.right(numbers, known, 5)
    for low in np.arange(0.05, 0.95, 0.1):
        inside = (chances >= low) & (chances < low + 0.1)
        assert right[inside].mean() == pytest.approx(chances[inside].mean(), abs=0.02)
    survived = np.cumprod(right, axis=1)
    assert survived.mean(axis=0) == pytest.approx(scripts.survivals(numbers, known, 5).mean(axis=0), abs=0.01)


def test_a_token_is_as_hard_for_every_setting_that_comes_to_it() -> None:
    """The draft at place 12 is the third behind 10 tokens and the first behind 12: its luck is the same."""
    scripts = Scripts(np.array([0.0]), np.array([9], np.uint64), slope=0.0, spread=1.0)
    whole = scripts.right(np.array([0]), np.array([10]), 5)[0]
    for first in range(1, 5):
        part = scripts.right(np.array([0]), np.array([10 + first]), 5 - first)[0]
        assert part.tolist() == whole[first:].tolist()


def test_traffic() -> None:
    easy, hard, mixed = (Scripts.of(name, 400, seed=1).levels for name in ("easy", "hard", "mixed"))
    assert easy.mean() == pytest.approx(2.5, abs=0.1) and hard.mean() == pytest.approx(-1.0, abs=0.1)
    assert mixed[::2].mean() == pytest.approx(2.5, abs=0.1) and mixed[1::2].mean() == pytest.approx(
        -1, abs=0.1
    )
    assert not np.array_equal(Scripts.of("easy", 4, 1).levels, Scripts.of("easy", 4, 2).levels)
    again = Scripts.of("easy", 4, 1)
    assert np.array_equal(again.levels, Scripts.of("easy", 4, 1).levels)
    assert again.right(at(4), at(4), 5).tolist() == Scripts.of("easy", 4, 1).right(at(4), at(4), 5).tolist()


def test_it_is_the_same_on_every_machine() -> None:
    scripts = Scripts(np.array([0.0]), np.array([1], np.uint64), slope=0.0, spread=1.0)
    found = scripts.chances(np.array([0]), np.array([0]), 3)[0]
    assert found == pytest.approx([0.40849181, 0.64413621, 0.46923496])


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=4), st.floats(0, 1), st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_steady_requests_have_the_same_chances_at_every_place(
    levels: list[float], slope: float, seed: int
) -> None:
    scripts = Scripts.steady(levels, slope, seed)
    wanted = sigmoid(np.array(levels)[:, None] - slope * np.arange(5))
    for known in (0, 7, 400):
        found = scripts.chances(at(len(levels)), np.full(len(levels), known), 5)
        np.testing.assert_allclose(found, wanted)


def test_what_a_drafter_says() -> None:
    chances = np.array([[0.9, 0.5, 0.2]])
    assert said(chances, Confidences.ABSENT) is None
    assert said(chances, Confidences.RIGHT) is chances
    sure = said(chances, Confidences.TOO_SURE)
    assert sure is not None and sure[0, 0] > 0.95 and sure[0, 1] == pytest.approx(0.5) and sure[0, 2] < 0.1
    np.testing.assert_allclose(Calibration((HEAT,) * 3).apply(sure), chances)
