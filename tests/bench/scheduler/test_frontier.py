"""The frontier against brute force, and between its points."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.bench.scheduler.frontier import at, frontier

positive = st.floats(0.001, 100)
points = st.lists(st.tuples(positive, positive), min_size=1, max_size=12)


@given(points)
def test_nothing_beats_a_point_of_the_frontier_in_both(measured: list[tuple[float, float]]) -> None:
    found = frontier(measured)
    beaten = {p for p in measured if any((q[0] <= p[0] and q[1] >= p[1] and q != p) for q in measured)}
    assert set(found) == set(measured) - beaten
    assert found == sorted(found)


@given(points, positive)
def test_never_less_than_the_best_single_setting_that_keeps_the_p99(
    measured: list[tuple[float, float]], p99: float
) -> None:
    """Interpolating can only be generous to stock."""
    keeping = [throughput for reached, throughput in measured if reached <= p99]
    found = at(measured, p99)
    assert (found is None) == (p99 < 0.97 * min(reached for reached, _ in measured))
    if found is not None:
        assert max(keeping, default=0.0) <= found * (1 + 1e-9)
        assert found <= max(t for _, t in measured) * (1 + 1e-9)


def test_halfway_between_two_settings_is_on_the_logarithm() -> None:
    measured = [(0.04, 1_000.0), (0.16, 3_000.0), (0.05, 500.0)]
    assert at(measured, 0.08) == pytest.approx(2_000.0)
    assert at(measured, 0.04) == 1_000.0
    assert at(measured, math.inf) == 3_000.0
    assert at(measured, 0.039) == 1_000.0  # 3 % below is the same
    assert at(measured, 0.0387) is None and at([], 1.0) is None
