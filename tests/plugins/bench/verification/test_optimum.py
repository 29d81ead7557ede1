"""The optimum against what can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_deepinfer_plugins.bench.verification.optimum import best, costs, over_best

from vllm_deepinfer.policy.verification import Curve, assign
from vllm_deepinfer.policy.verification_cost import SlotCosts

SURVIVED = np.array([[0.8, 0.4], [0.5, 0.1]])
SECONDS = {0: 1.0, 1: 1.1, 2: 1.2, 3: 1.6, 4: 1.7}


def test_the_best_of_all_choices() -> None:
    """(2 + 0.8 + 0.5) / 1.2 = 2.75 beats (2 + 0.8) / 1.1 = 2.545 and (2 + 0.8 + 0.4 + 0.5) / 1.6."""
    rate, lengths = best(SURVIVED, SECONDS)
    assert lengths == (1, 1) and rate == pytest.approx(2.75)
    assert best(SURVIVED, {0: 1.0, 4: 1.7})[1] == (2, 2), "sizes that were never measured are left out"


def test_choices_over_the_best() -> None:
    assert over_best(SURVIVED, SECONDS, [(9.0, [1, 1])] * 3) == pytest.approx(1.0), (
        "its own times do not count"
    )
    mixed = (3.3 + 2.0) / (1.2 + 1.0) / 2.75
    assert over_best(SURVIVED, SECONDS, [(1.0, [1, 1]), (1.0, [0, 0])]) == pytest.approx(mixed)
    assert over_best(SURVIVED, SECONDS, [(1.0, [0, 2])]) < over_best(SURVIVED, SECONDS, [(1.0, [2, 0])]) < 1


def test_costs_are_medians_by_the_number_of_drafts() -> None:
    traces = [[(1.0, [1, 0]), (3.0, [0, 1])], [(2.0, [1, 0]), (9.0, [2, 2])]]
    assert costs(traces) == {1: 2.0, 4: 9.0}


@given(
    st.lists(st.lists(st.floats(0.01, 0.99), min_size=3, max_size=3), min_size=1, max_size=3),
    st.lists(st.floats(0.001, 0.3), min_size=9, max_size=9),
)
@settings(max_examples=60, deadline=None)
def test_the_policy_reaches_it_where_costs_are_known(chances: list[list[float]], jags: list[float]) -> None:
    """Two implementations that share no line: all choices, and the curve over drafts in order of survival."""
    survived = np.cumprod(np.array(chances), axis=1)
    base = np.cumsum([1.0, *jags])[: survived.size + 1]
    costs_ = SlotCosts(base, np.zeros_like(survived))
    curve = Curve.of(survived, costs_, len(survived))
    lengths = assign(survived, costs_, curve.best, curve.price)
    table = dict(enumerate(base.tolist()))
    assert curve.price == pytest.approx(best(survived, table)[0])
    assert over_best(survived, table, [(1.0, lengths.tolist())]) == pytest.approx(1.0)
