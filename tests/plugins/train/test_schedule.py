from __future__ import annotations

import pytest
from vllm_deepinfer_plugins.train.schedule import Schedule

PLAN = Schedule(100, tokens=2048, lengths=((0.0, 256), (0.5, 1024)), sparse=0.4, warmup=10, cooldown=0.5)


def test_the_rate_rises_stays_and_falls() -> None:
    assert [PLAN.rate(step) for step in (0, 4, 9, 30, 50)] == pytest.approx([0.1, 0.5, 1, 1, 1])
    assert PLAN.rate(75) == pytest.approx(0.02 + 0.98 * 0.5)
    assert PLAN.rate(99) == pytest.approx(0.02 + 0.98 * 0.02)
    rates = [PLAN.rate(step) for step in range(50, 100)]
    assert rates == sorted(rates, reverse=True)


def test_rows_get_longer_and_fewer() -> None:
    assert [PLAN.shape(step) for step in (0, 49, 50, 99)] == [(8, 256), (8, 256), (2, 1024), (2, 1024)]


def test_the_selection_comes_into_force() -> None:
    assert [PLAN.selects(step) for step in (0, 39, 40, 99)] == [False, False, True, True]


def test_a_shorter_training_begins_as_a_longer_one_does() -> None:
    longer = Schedule(400, tokens=2048, lengths=PLAN.lengths, sparse=0.4, warmup=10, cooldown=0.5)
    assert [PLAN.rate(step) for step in range(40)] == [longer.rate(step) for step in range(40)]
