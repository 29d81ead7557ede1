"""StepCost: hand-computed values, and monotone, non-negative, additive for every input."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE, AttentionBound, Features, StepCost, Work

UNIT = StepCost(1.0, 10.0, 100.0, 1e3, 1e4, 1e5)  # every coefficient is visible as its own digit

tokens = st.integers(0, 5_000)
contexts = st.integers(0, 300_000)
bounds = st.builds(
    AttentionBound,
    window=st.none() | st.integers(1, 4_096),
    top_k=st.none() | st.integers(1, 4_096),
)
coefficients = st.floats(0, 1, allow_subnormal=False)
costs = st.builds(
    StepCost,
    *[coefficients] * 6,
    attention=bounds,
    tile=st.sampled_from([1, 8, 32, 128]),
)
works = st.one_of(
    st.builds(Work, context=contexts, prefill_tokens=st.integers(1, 5_000)),
    st.builds(Work, context=contexts, draft_tokens=st.integers(0, 8)),
)
batches = st.lists(works, max_size=12)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ([], 0.0),
        ([Work(context=0, prefill_tokens=1)], 1 + 10 + 100 * 0.5),
        ([Work(context=3, prefill_tokens=2)], 1 + 20 + 100 * (2 * 3 + 2) + 1e5 * 3),
        ([Work(context=7)], 1 + 1e3 + 1e4 * 7),
        ([Work(context=7), Work(context=5)], 1 + 2e3 + 1e4 * 12),
        ([Work(context=7, draft_tokens=2)], 1 + 20 + 100 * (14 + 2) + 1e3 + 7e4),
        ([Work(context=7), Work(context=3, prefill_tokens=2)], 1 + 20 + 100 * 8 + 1e3 + 7e4 + 3e5),
    ],
)
def test_predict_is_the_formula(batch: list[Work], expected: float) -> None:
    assert UNIT.predict(batch) == pytest.approx(expected)


def test_the_measured_model_reproduces_its_source() -> None:
    """A 512-token chunk at a context of 1k and of 16k: the reason why chunks are cut by time."""
    near = TWO_CORE_DENSE.predict([Work(context=1_024, prefill_tokens=512)])
    far = TWO_CORE_DENSE.predict([Work(context=16_384, prefill_tokens=512)])
    assert near == pytest.approx(0.0365, abs=5e-4)
    assert far == pytest.approx(0.1354, abs=5e-4)


@pytest.mark.parametrize(
    ("bound", "n", "x", "expected"),
    [
        (AttentionBound(), 4, 10, 4 * 10 + 8),
        (AttentionBound(window=8), 4, 10, 4 * 8),
        (AttentionBound(window=8), 4, 6, 2 * 6 + 2 + 2 * 8),  # two queries grow, two are at the bound
        (AttentionBound(window=8, top_k=4), 4, 10, 2 * 10 + 2 + 2 * 12),
        (AttentionBound(top_k=4), 4, 0, 8),
        (AttentionBound(window=8), 0, 6, 0),
    ],
)
def test_attended_pairs(bound: AttentionBound, n: int, x: int, expected: float) -> None:
    assert bound.attended(n, x) == expected


def test_scanned_keys_follow_the_window_unless_a_selection_has_to_score_them_all() -> None:
    assert AttentionBound().scanned(1_000) == 1_000
    assert AttentionBound(window=128).scanned(1_000) == 128
    assert AttentionBound(window=128).scanned(100) == 100
    assert AttentionBound(window=128, top_k=512).scanned(1_000) == 1_000


@given(bounds, st.integers(0, 200), st.integers(0, 5_000))
def test_attended_matches_the_sum_over_queries(bound: AttentionBound, n: int, x: int) -> None:
    """The integral lies between the sums that count a query's own key never and always."""
    low = sum(min(x + i, bound.span) for i in range(n))
    high = sum(min(x + i + 1, bound.span) for i in range(n))
    assert low <= bound.attended(n, x) <= high


@given(bounds, st.integers(0, 2_000), st.integers(0, 2_000), contexts)
def test_attended_does_not_depend_on_the_chunking(bound: AttentionBound, n: int, m: int, x: int) -> None:
    assert bound.attended(n + m, x) == pytest.approx(bound.attended(n, x) + bound.attended(m, x + n))


@given(costs, batches)
def test_never_negative_and_finite(cost: StepCost, batch: list[Work]) -> None:
    assert 0 <= cost.predict(batch) < math.inf


@given(costs, batches, works)
def test_more_work_never_takes_less_time(cost: StepCost, batch: list[Work], more: Work) -> None:
    assert cost.predict([*batch, more]) >= cost.predict(batch) * (1 - 1e-12)


@given(costs, works, st.integers(0, 1_000), st.integers(0, 1_000))
def test_monotone_in_tokens_and_context(cost: StepCost, work: Work, tokens: int, context: int) -> None:
    grown = replace(
        work,
        context=work.context + context,
        prefill_tokens=work.prefill_tokens + (tokens if work.prefill_tokens else 0),
        draft_tokens=work.draft_tokens + (0 if work.prefill_tokens else tokens),
    )
    assert cost.predict([grown]) >= cost.predict([work]) * (1 - 1e-12)


@given(costs, batches)
def test_order_does_not_matter(cost: StepCost, batch: list[Work]) -> None:
    assert cost.predict(batch) == pytest.approx(cost.predict(batch[::-1]))


@given(costs, batches, batches)
def test_one_step_never_costs_more_than_two(cost: StepCost, left: list[Work], right: list[Work]) -> None:
    """Cutting a step in two can only add the cost of a step and of a tile: what chunking pays for latency."""
    assert cost.predict(left + right) <= (cost.predict(left) + cost.predict(right)) * (1 + 1e-9)


@given(st.integers(1, 4_000), contexts)
def test_the_tile_rounds_tokens_up(n: int, x: int) -> None:
    tiled = StepCost(0, 1.0, tile=32).predict([Work(context=x, prefill_tokens=n)])
    assert tiled % 32 == 0 and n <= tiled < n + 32


def test_features_add_up() -> None:
    left, right = Features(1, 2, 3, 4, 5), Features(10, 20, 30, 40, 50)
    assert left + right == Features(11, 22, 33, 44, 55)
    assert left + Features() == left


@pytest.mark.parametrize("field", [f.name for f in fields(StepCost) if f.name.startswith("per_")])
@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
def test_a_bad_coefficient_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be a finite number"):
        replace(TWO_CORE_DENSE, **{field: value})  # type: ignore[arg-type]


def test_other_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="tile must be at least 1"):
        StepCost(0, 0, tile=0)
    with pytest.raises(ValueError, match="window must be at least 1"):
        AttentionBound(window=0)
    with pytest.raises(ValueError, match="top_k must be at least 1"):
        AttentionBound(window=4, top_k=-1)
    with pytest.raises(ValueError, match="cannot be negative"):
        Work(context=-1)
    with pytest.raises(ValueError, match="verifies no drafts"):
        Work(context=1, prefill_tokens=1, draft_tokens=1)
