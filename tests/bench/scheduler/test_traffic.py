"""Traffic: the same for everybody, within its bounds, as many prompts of every doubling."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.bench.scheduler.traffic import LONG, MIXED, MIXES, SHORT, Mix


@given(st.integers(0, 1_000), st.sampled_from(MIXES))
def test_lengths_repeat_and_keep_their_bounds(seed: int, mix: Mix) -> None:
    first = list(islice(mix.lengths(seed), 50))
    assert first == list(islice(mix.lengths(seed), 50))
    assert all(mix.shortest <= length <= mix.longest for length in first)


def test_seeds_and_mixes_differ() -> None:
    assert list(islice(MIXED.lengths(0), 9)) != list(islice(MIXED.lengths(1), 9))
    assert list(islice(MIXED.lengths(0), 9)) != list(islice(LONG.lengths(0), 9))


def test_every_doubling_has_its_share() -> None:
    lengths = list(islice(Mix("x", 100, 1_600).lengths(0), 8_000))
    for low in (100, 200, 400, 800):
        assert sum(low <= n < 2 * low for n in lengths) / 8_000 == pytest.approx(0.25, abs=0.02)


@given(st.integers(0, 100))
def test_arrivals_are_in_order_and_in_time(seed: int) -> None:
    arrivals = SHORT.arrivals(seed, 5.0, 20.0)
    times = [due for due, _ in arrivals]
    assert times == sorted(times) and all(0 < due < 20 for due in times)


def test_arrivals_come_at_their_rate() -> None:
    assert len(SHORT.arrivals(0, 5.0, 2_000.0)) == pytest.approx(10_000, rel=0.05)


def test_divided() -> None:
    assert LONG.divided(4) == Mix("long", 2_000, 5_000)
    assert SHORT.divided(1) == SHORT
    assert Mix("tiny", 2, 8).divided(4).shortest == 1
