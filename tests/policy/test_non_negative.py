"""Non-negative least squares against every possible set of free coefficients."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from vllm_deepinfer.policy.non_negative import solve

entries = st.floats(-3, 3, allow_subnormal=False)


def brute_force(gram: NDArray[np.float64], moment: NDArray[np.float64]) -> float:
    """The lowest objective over all sets of free entries whose solution is non-negative."""
    best = 0.0  # θ = 0
    for chosen in product((False, True), repeat=len(moment)):
        free = np.array(chosen)
        if not free.any():
            continue
        theta = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
        if (theta >= 0).all():
            best = min(best, float(-0.5 * moment[free] @ theta))
    return best


@given(st.integers(1, 5), st.data())
def test_no_choice_of_free_coefficients_is_better(size: int, data: st.DataObject) -> None:
    rows = np.array(data.draw(st.lists(st.lists(entries, min_size=size, max_size=size), max_size=8)))
    rows = rows.reshape(-1, size)
    moment = np.array(data.draw(st.lists(entries, min_size=size, max_size=size)))
    gram = rows.T @ rows + 0.1 * np.eye(size)
    theta = solve(gram, moment)
    assert (theta >= 0).all()
    assert 0.5 * theta @ gram @ theta - moment @ theta == pytest.approx(brute_force(gram, moment), abs=1e-6)


def test_without_a_bound_in_the_way_it_is_the_ordinary_solution() -> None:
    gram, moment = np.array([[2.0, 0.5], [0.5, 1.0]]), np.array([3.0, 2.0])
    assert solve(gram, moment) == pytest.approx(np.linalg.solve(gram, moment))


def test_a_coefficient_that_wants_to_be_negative_is_zero_and_the_rest_is_solved_again() -> None:
    assert solve(np.array([[1.0, 0.9], [0.9, 1.0]]), np.array([1.0, 0.0])).tolist() == [1.0, 0.0]


def test_nothing_to_gain() -> None:
    assert solve(np.eye(3), -np.ones(3)).tolist() == [0.0, 0.0, 0.0]
