"""What a round costs: the step cost taken apart by drafts, and what was learned about sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE, AttentionBound, Features, StepCost, Work
from vllm_deepinfer.policy.verification import predict
from vllm_deepinfer.policy.verification_cost import RoundCost, RowResiduals

coefficients = st.floats(0, 1, allow_subnormal=False)
steps = st.builds(
    StepCost,
    st.floats(0.01, 1),
    *[coefficients] * 5,
    attention=st.builds(
        AttentionBound, window=st.none() | st.integers(1, 512), top_k=st.none() | st.integers(1, 512)
    ),
    tile=st.sampled_from([1, 4, 32]),
)
batches = st.lists(st.tuples(st.integers(0, 2_000), st.integers(0, 4)), min_size=1, max_size=5)
chunks = st.none() | st.tuples(st.integers(0, 1_000), st.integers(1, 200))


@given(steps, batches, chunks)
def test_a_round_is_the_step_cost_s_own_prediction(
    step: StepCost, batch: list[tuple[int, int]], chunk: tuple[int, int] | None
) -> None:
    """Any lengths, any contexts, any prefill beside them: base + own + aside = predict(batch)."""
    contexts = np.array([float(context) for context, _ in batch])
    lengths = np.array([drafts for _, drafts in batch])
    prefill = [Work(chunk[0], prefill_tokens=chunk[1])] if chunk else []
    others = sum(map(step.features, prefill), Features())
    costs = RoundCost(step).slots(contexts, 4, others)
    seconds = predict(np.zeros((len(batch), 4)), costs, 1.0, lengths)[1] + costs.aside
    work = [Work(context, draft_tokens=drafts) for context, drafts in batch] + prefill
    assert seconds == pytest.approx(step.predict(work), rel=1e-9)
    assert (np.diff(costs.own, axis=1) >= 0).all()
    assert costs.aside == 0 or chunk


@given(steps, batches)
def test_the_features_of_drafts_are_the_step_cost_s(step: StepCost, batch: list[tuple[int, int]]) -> None:
    cost = RoundCost(step)
    contexts = np.array([float(context) for context, _ in batch])
    lengths = np.array([drafts for _, drafts in batch])
    found = cost.decodes(contexts) + cost.drafts(contexts, lengths)
    exact = sum((step.features(Work(context, draft_tokens=n)) for context, n in batch), Features())
    for name in ("tokens", "attended", "decodes", "decode_context", "prefill_context"):
        assert getattr(found, name) == pytest.approx(getattr(exact, name))


def test_decodes_without_drafts_and_drafting_are_in_the_base() -> None:
    step = StepCost(1.0, 0.1, per_decode=0.5, per_decode_context=0.001)
    plain = RoundCost(step).slots(np.array([100.0]), 2).base
    cost = RoundCost(step, draft_per_step=0.25, draft_per_request=0.125)
    beside = Features(decodes=2, decode_context=300)
    assert plain == pytest.approx([1.6, 1.7, 1.8])
    assert cost.slots(np.array([100.0]), 2, beside).base == pytest.approx(plain + 0.375 + 2 * 0.5 + 0.3)


def test_graph_sizes_make_the_jags() -> None:
    """2 decodes and 0 … 6 drafts on sizes 4 and 7: rows 2 … 8 compute 4, 4, 4, 7, 7, 7, and 8 as they are."""
    step = StepCost(1.0, 1.0, per_decode=1.0)
    base = RoundCost(step, sizes=(4, 7)).slots(np.zeros(2), 3).base
    assert base.tolist() == [5, 5, 5, 8, 8, 8, 9]


def test_prefill_shifts_the_jags_and_is_put_aside() -> None:
    step = StepCost(1.0, 1.0, tile=4)
    alone = RoundCost(step).slots(np.zeros(1), 4)
    assert alone.base.tolist() == [1, 5, 5, 5, 5] and alone.aside == 0
    beside = RoundCost(step).slots(np.zeros(1), 4, Features(tokens=6))
    assert beside.base.tolist() == [1, 1, 1, 5, 5] and beside.aside == 8


def test_prefill_s_own_time_does_not_make_drafts_look_cheap() -> None:
    """40 steps with a chunk of 0.2 s, the others without; 4 000 tokens to decode, 8 per step and 16 ms.

    Rated by the mixed step's whole time, a draft pays from 0.43 tokens per 10 ms on; in the other steps the
    same 10 ms bring 5 tokens. All the work is done sooner when the chunk's time is put aside.
    """
    fixed, per_draft, prefill, requests = 0.016, 0.01, 0.2, 8

    def drafts(seconds: float) -> int:
        """How many of 8 drafts, accepted with 0.9, 0.8 …, the best rate over these seconds verifies."""
        rates = [
            (requests + sum(0.9 - 0.1 * i for i in range(n))) / (seconds + per_draft * n) for n in range(9)
        ]
        return int(np.argmax(rates))

    def finished(mixed: int, pure: int) -> float:
        tokens = [requests + sum(0.9 - 0.1 * i for i in range(n)) for n in (mixed, pure)]
        rest = (4_000 - 40 * tokens[0]) / tokens[1]
        return 40 * (fixed + prefill + per_draft * mixed) + rest * (fixed + per_draft * pure)

    aside, whole = drafts(fixed), drafts(fixed + prefill)
    assert (aside, whole) == (0, 5)
    assert finished(aside, aside) < finished(whole, aside)


def test_residuals_are_learned_by_size_and_interpolated() -> None:
    residuals = RowResiduals()
    assert residuals.at(np.array([1.0, 5.0])).tolist() == [0, 0]
    for _ in range(12):
        residuals.observe(2, 0.01, 0.012)
        residuals.observe(6, 0.01, 0.01)
    found = residuals.at(np.array([1.0, 2.0, 4.0, 6.0, 9.0]))
    assert found == pytest.approx([0.15, 0.15, 0.075, 0, 0])  # 0.2, of which 12 of 16 are believed


def test_a_stall_or_nonsense_moves_nothing() -> None:
    residuals = RowResiduals()
    for _ in range(12):
        residuals.observe(3, 0.01, 0.011)
    before = residuals.at(np.array([3.0]))[0]
    for predicted, seconds in ((0.01, 5.0), (0.0, 0.01), (0.01, 0.0), (math.nan, 0.01), (0.01, math.nan)):
        residuals.observe(3, predicted, seconds)
    residuals.observe(0, 0.01, 0.1)
    assert residuals.at(np.array([3.0]))[0] == pytest.approx(before, abs=0.005)


def test_residuals_are_bounded_and_recover() -> None:
    residuals = RowResiduals()
    for _ in range(16):
        residuals.observe(100, 0.01, 0.5)
        residuals.observe(400, 0.01, 0.0001)
    assert residuals.at(np.array([100.0, 400.0])).tolist() == [1.0, -0.5]
    for _ in range(16):
        residuals.observe(100, 0.01, 0.01)
    assert residuals.at(np.array([100.0]))[0] == 0


def test_residuals_scale_steps_without_prefill_only() -> None:
    residuals = RowResiduals()
    for _ in range(16):
        residuals.observe(3, 0.01, 0.0125)
    plain = RoundCost(TWO_CORE_DENSE).slots(np.full(1, 500.0), 2)
    learned = RoundCost(TWO_CORE_DENSE, residuals=residuals)
    assert learned.slots(np.full(1, 500.0), 2).base == pytest.approx(plain.base * 1.2)
    mixed = Features(tokens=64)
    assert learned.slots(np.full(1, 500.0), 2, mixed).base.tolist() == (
        RoundCost(TWO_CORE_DENSE).slots(np.full(1, 500.0), 2, mixed).base.tolist()
    )


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
def test_bad_drafting_costs_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="draft_per_request must be a finite number"):
        RoundCost(TWO_CORE_DENSE, draft_per_request=bad)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 4), (8, 4)])
def test_bad_graph_sizes_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="graph sizes must ascend"):
        RoundCost(TWO_CORE_DENSE, sizes=sizes)
