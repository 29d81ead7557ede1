"""One step for drafts and prefill: within its limit, and near the best split that there is."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_deepinfer.policy.prefill_budget import Prefill
from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE, Features, StepCost, Work
from vllm_deepinfer.policy.verification import Curve, survival
from vllm_deepinfer.policy.verification_cost import RoundCost
from vllm_deepinfer.policy.verification_share import share

STEP = StepCost(4e-3, 1e-3, per_decode=0.5e-3)
SURVIVED = survival(np.array([[0.9, 0.8, 0.6], [0.7, 0.5, 0.3]]), np.array([3, 3]))
CONTEXTS = np.array([100.0, 100.0])
PROMPT = [Prefill("p", 0, 500)]

steps = st.builds(
    StepCost,
    st.floats(1e-3, 20e-3),
    st.floats(1e-5, 3e-3),
    st.floats(0, 1e-7),
    st.floats(0, 1e-3),
    st.floats(0, 1e-7),
    st.floats(0, 1e-6),
    tile=st.sampled_from([1, 4, 32]),
)
queues = st.lists(st.tuples(st.integers(0, 3_000), st.integers(1, 400)), max_size=3).map(
    lambda pairs: [Prefill(str(i), context, tokens) for i, (context, tokens) in enumerate(pairs)]
)


def exact(
    step: StepCost, slots: float, attended: float, chunks: dict[str, int], queue: list[Prefill]
) -> float:
    decodes = Features(slots, attended, len(CONTEXTS), float(CONTEXTS.sum()))
    work = [Work(p.context, prefill_tokens=chunks[p.key]) for p in queue if p.key in chunks]
    return step.seconds(sum((step.features(w) for w in work), decodes))


@settings(deadline=None)
@given(steps, queues, st.floats(1e-3, 0.2), st.integers(0, 600), st.floats(0.3, 4))
def test_neither_limit_nor_cap_is_exceeded(
    step: StepCost, queue: list[Prefill], limit: float, cap: int, weight: float
) -> None:
    found = share(SURVIVED, CONTEXTS, RoundCost(step), queue, limit, cap, weight=weight)
    assert found.slots + sum(found.chunks.values()) <= cap
    if found.slots or found.chunks:
        assert found.seconds <= limit * (1 + 1e-9)
    least = exact(step, found.slots, 0.0, found.chunks, queue)
    most = exact(step, found.slots, found.slots * 103.0, found.chunks, queue)
    assert least * (1 - 1e-9) <= found.seconds <= most * (1 + 1e-9)


@settings(deadline=None)
@given(st.floats(6e-3, 60e-3), st.floats(0.3, 4))
def test_no_other_split_brings_more(limit: float, weight: float) -> None:
    """Brute force over every number of drafts: tokens, and what the rest is worth as prefill's time."""
    cost = RoundCost(STEP)
    curve = Curve.of(SURVIVED, cost.slots(CONTEXTS, 3), 2.0)
    found = share(SURVIVED, CONTEXTS, cost, PROMPT, limit, 1_000, weight=weight)

    def worth(slots: int) -> float:
        room = limit - float(curve.seconds[slots])
        prefill = math.floor(room / STEP.per_token + 1e-9) * STEP.per_token
        return float(curve.tokens[slots]) + weight * curve.price * prefill

    options = [n for n in range(7) if curve.seconds[n] <= limit]
    if options:
        one_token = weight * curve.price * STEP.per_token
        assert worth(found.slots) >= max(map(worth, options)) - one_token
    else:
        assert found.slots == 0 and found.chunks == {}


def test_drafts_that_pay_go_first_and_prefill_gets_the_rest() -> None:
    """Worked example: 5 ms for two decodes, 1 ms per token; drafts that bring more than λ/1000 pay."""
    found = share(SURVIVED, CONTEXTS, RoundCost(STEP), PROMPT, 0.020, 1_000)
    assert found.slots == 3 and found.chunks == {"p": 12}
    assert found.price == pytest.approx((2 + 0.9 + 0.72 + 0.7) / 8e-3)
    assert found.seconds == pytest.approx(0.020)


def test_late_prompts_push_drafts_out() -> None:
    found = [
        share(SURVIVED, CONTEXTS, RoundCost(STEP), PROMPT, 0.020, 1_000, weight=weight)
        for weight in (1, 1.5, 3)
    ]
    assert [each.slots for each in found] == [3, 1, 0]
    assert [each.chunks["p"] for each in found] == [12, 14, 15]


def test_a_weight_does_nothing_where_all_of_it_fits() -> None:
    found = share(SURVIVED, CONTEXTS, RoundCost(STEP), [Prefill("p", 0, 5)], 0.020, 1_000, weight=3)
    assert found.slots == 3 and found.chunks == {"p": 5}
    assert share(SURVIVED, CONTEXTS, RoundCost(STEP), [], 0.020, 1_000, weight=3).slots == 3


def test_drafts_make_room_for_a_chunk_that_must_be() -> None:
    """7 ms: two drafts would fit. The smallest chunk of two tokens must be there, so none does."""
    alone = share(SURVIVED, CONTEXTS, RoundCost(STEP), PROMPT, 0.0071, 1_000)
    assert alone.slots == 2 and alone.chunks == {}
    forced = share(SURVIVED, CONTEXTS, RoundCost(STEP), PROMPT, 0.0071, 1_000, smallest=2)
    assert forced.slots == 0 and forced.chunks == {"p": 2} and forced.seconds <= 0.0071
    over = share(SURVIVED, CONTEXTS, RoundCost(STEP), PROMPT, 0.001, 1_000, smallest=2)
    assert over.slots == 0 and over.chunks == {"p": 2} and over.seconds == pytest.approx(0.007)


def test_drafting_time_counts_against_the_limit() -> None:
    drafting = RoundCost(STEP, draft_per_step=5e-3)
    found = share(SURVIVED, CONTEXTS, drafting, PROMPT, 0.020, 1_000)
    assert found.seconds <= 0.020 * (1 + 1e-9)
    assert sum(found.chunks.values()) + found.slots == 10


def test_without_decodes_all_is_prefill() -> None:
    found = share(np.zeros((0, 3)), np.zeros(0), RoundCost(TWO_CORE_DENSE), PROMPT, math.inf, 300)
    assert found.slots == 0 and found.chunks == {"p": 300}


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="worth more than nothing"):
        share(SURVIVED, CONTEXTS, RoundCost(STEP), PROMPT, 0.02, 100, weight=weight)
