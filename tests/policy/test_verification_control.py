"""Decisions step after step: fallbacks, steadiness, tries, limits; and how near they come to the optimum."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE, Features, StepCost
from vllm_deepinfer.policy.verification import predict, survival
from vllm_deepinfer.policy.verification_control import Decision, Drafts, Form, Reason, Rule, Verifier
from vllm_deepinfer.policy.verification_cost import RoundCost

STEP = StepCost(10e-3, 1e-3, per_decode=0.5e-3)
PLAIN = Rule(min_gain=0.0, explore_share=0.0, delay=0)


def drafts(
    confidences: list[list[float]], contexts: list[int] | None = None, lengths: list[int] | None = None
) -> Drafts:
    there = np.array(confidences)
    return Drafts(
        [f"r{i}" for i in range(len(there))],
        np.array(contexts or [100] * len(there), dtype=np.float64),
        np.array(lengths or [there.shape[1]] * len(there)),
        there,
    )


def steady(verifier: Verifier, batch: Drafts, cost: RoundCost, steps: int = 4) -> Decision:
    for _ in range(steps - 1):
        verifier.decide(batch, cost)
    return verifier.decide(batch, cost)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.floats(0.02, 0.98), min_size=3, max_size=3), min_size=1, max_size=3),
    st.lists(st.integers(0, 60_000), min_size=3, max_size=3),
    st.sampled_from([1, 4]),
    st.floats(0.1e-3, 20e-3),
)
def test_known_acceptance_comes_out_at_the_optimum(
    confidences: list[list[float]], contexts: list[int], tile: int, per_token: float
) -> None:
    """Against brute force over all lengths, with true rates that stay: ≥ 0.99 of the best."""
    step = StepCost(10e-3, per_token, 20e-9, 0.5e-3, 0.1e-6, tile=tile)
    cost = RoundCost(step, draft_per_step=1e-3)
    batch = drafts(confidences, contexts[: len(confidences)])
    found = steady(Verifier(Rule(explore_share=0.0, min_gain=0.005)), batch, cost)
    survived = survival(batch.confidences, batch.drafted)
    costs = cost.slots(batch.contexts, 3)

    def rate(lengths: np.ndarray) -> float:
        tokens, seconds = predict(survived, costs, float(len(confidences)), lengths)
        return tokens / seconds

    optimum = max(rate(np.array(each)) for each in itertools.product(range(4), repeat=len(confidences)))
    assert rate(found.lengths) >= 0.99 * optimum
    assert found.reason is Reason.SCHEDULED and not found.fallback
    assert found.tokens is not None and found.seconds is not None
    assert found.tokens / found.seconds == pytest.approx(rate(found.lengths), rel=1e-6)
    assert found.gain == pytest.approx(rate(found.lengths) / rate(batch.drafted), rel=1e-6)


def test_without_a_cost_everything_is_verified_and_said_so() -> None:
    found = Verifier().decide(drafts([[0.1, 0.1], [0.1, 0.1]], lengths=[2, 1]), None)
    assert found.lengths.tolist() == [2, 1] and found.reason is Reason.NO_COST and found.fallback
    assert found.tokens is found.seconds is found.gain is None


@pytest.mark.parametrize("form", list(Form))
def test_a_confidence_that_is_no_number_verifies_everything(form: Form) -> None:
    verifier, cost = Verifier(Rule(form, delay=1)), RoundCost(STEP)
    steady(verifier, drafts([[0.05, 0.05]]), cost)
    found = verifier.decide(drafts([[0.05, math.nan]]), cost)
    assert found.lengths.tolist() == [2] and found.reason is Reason.NOT_A_NUMBER and found.fallback
    after = verifier.decide(drafts([[0.05, 0.05]]), cost)
    assert after.reason is Reason.SCHEDULED and after.lengths.tolist() == [0]


def test_behind_the_drafts_that_there_are_any_number_may_stand() -> None:
    found = steady(Verifier(PLAIN), drafts([[0.9, math.nan]], lengths=[1]), RoundCost(STEP))
    assert found.reason is Reason.SCHEDULED and found.lengths.tolist() == [1]


def test_until_confidences_are_old_enough_everything_is_verified() -> None:
    verifier, batch = Verifier(), drafts([[0.05, 0.05]])
    reasons = [verifier.decide(batch, RoundCost(STEP)).reason for _ in range(4)]
    assert reasons == [Reason.NO_HISTORY] * 2 + [Reason.SCHEDULED] * 2


def test_nothing_drafted_is_no_fallback() -> None:
    found = Verifier().decide(drafts([[0.5, 0.5]], lengths=[0]), None)
    assert found.reason is Reason.NO_DRAFTS and not found.fallback and found.lengths.tolist() == [0]
    empty = Drafts([], np.zeros(0), np.zeros(0, np.int64), np.zeros((0, 5)))
    assert Verifier().decide(empty, RoundCost(STEP)).reason is Reason.NO_DRAFTS


def test_the_number_is_from_two_steps_ago_and_the_places_from_now() -> None:
    """Two requests, costs for about two drafts: who is sure now gets them."""
    verifier, cost = (
        Verifier(Rule(min_gain=0, explore_share=0)),
        RoundCost(StepCost(3e-3, 1e-3, per_decode=0.5e-3)),
    )
    one, other = drafts([[0.95, 0.9], [0.05, 0.05]]), drafts([[0.05, 0.05], [0.95, 0.9]])
    found = [verifier.decide(batch, cost).lengths.tolist() for batch in (one, one, one, other, other)]
    assert found[2:] == [[2, 0], [0, 2], [0, 2]]
    hopeless = drafts([[0.05, 0.05], [0.05, 0.05]])
    sums = [int(verifier.decide(hopeless, cost).lengths.sum()) for _ in range(3)]
    assert sums == [2, 2, 0]


def test_the_synchronous_form_needs_no_history() -> None:
    verifier = Verifier(Rule(Form.SYNCHRONOUS))
    found = verifier.decide(
        drafts([[0.9, 0.8], [0.1, 0.1]]), RoundCost(StepCost(3e-3, 1e-3, per_decode=0.5e-3))
    )
    assert found.lengths.tolist() == [2, 0] and found.reason is Reason.SCHEDULED
    assert found.tokens == pytest.approx(2 + 0.9 + 0.72) and found.seconds == pytest.approx(6e-3)
    assert found.gain == pytest.approx((3.62 / 6) / ((3.62 + 0.11) / 8))


def test_small_changes_of_the_gain_do_not_move_the_number() -> None:
    """Confidences that hover around where a draft pays: with a minimum gain the length stays what it was."""
    random = np.random.default_rng(0)
    cost = RoundCost(StepCost(1e-3, 0.64e-3))

    def changes(rule: Rule) -> int:
        verifier = Verifier(rule)
        sums = [
            int(verifier.decide(drafts([[0.64 + 0.005 * random.standard_normal()]]), cost).lengths.sum())
            for _ in range(300)
        ]
        return sum(a != b for a, b in itertools.pairwise(sums[2:]))

    assert changes(Rule(min_gain=0.0, explore_share=0.0)) > 60
    assert changes(Rule(min_gain=0.02, explore_share=0.0)) <= 1


def test_a_clear_gain_moves_it() -> None:
    verifier, cost = Verifier(Rule(explore_share=0.0)), RoundCost(STEP)
    assert steady(verifier, drafts([[0.9] * 5]), cost).lengths.tolist() == [5]
    assert steady(verifier, drafts([[0.02] * 5]), cost).lengths.tolist() == [0]
    assert steady(verifier, drafts([[0.9] * 5]), cost).lengths.tolist() == [5]


def test_tries_are_marked_and_rare() -> None:
    verifier, batch = Verifier(Rule(explore_share=0.02, explore_every=8)), drafts([[0.02] * 4])
    found = [verifier.decide(batch, RoundCost(STEP)) for _ in range(400)]
    explored = [each for each in found if each.reason is Reason.EXPLORED]
    assert 0 < len(explored) <= 50
    assert {int(each.lengths.sum()) for each in explored} >= {1, 2}
    assert all(each.lengths.sum() == 0 for each in found[2:] if each.reason is Reason.SCHEDULED)


@given(st.floats(1e-3, 60e-3), st.integers(0, 40), st.floats(0.5, 4))
@settings(deadline=None, max_examples=40)
def test_a_limit_is_kept_with_the_prefill_that_shares_the_step(
    limit: float, prefill: int, weight: float
) -> None:
    verifier, cost = Verifier(Rule(explore_share=0.5, explore_every=1)), RoundCost(STEP)
    batch = drafts([[0.95] * 4] * 3)
    others = Features(tokens=prefill)
    for _ in range(8):
        found = verifier.decide(batch, cost, others, limit, weight)
    tokens = prefill + int(found.lengths.sum())
    seconds = STEP.seconds(Features(tokens=tokens, decodes=3, decode_context=300))
    assert seconds <= limit * (1 + 1e-9) or found.lengths.sum() == 0


def test_weight_leaves_prefill_more_room() -> None:
    batch, cost = (
        drafts([[0.9, 0.1], [0.8, 0.1], [0.95, 0.1], [0.99, 0.1]]),
        RoundCost(StepCost(4e-3, 1e-3, per_decode=0.5e-3)),
    )
    sums = []
    for weight in (1.0, 1.2, 4.0):
        verifier = Verifier(PLAIN)
        sums.append(int(verifier.decide(batch, cost, weight=weight).lengths.sum()))
    assert sums == [4, 2, 0]


def test_the_same_inputs_give_the_same_decisions() -> None:
    """So ranks that decide for themselves decide alike."""
    random = np.random.default_rng(3)
    verifiers = [Verifier(), Verifier()]
    for _ in range(60):
        batch = drafts(random.random((6, 5)).round(1).tolist(), random.integers(0, 9_000, 6).tolist())
        one, other = (each.decide(batch, RoundCost(TWO_CORE_DENSE)) for each in verifiers)
        assert one.lengths.tolist() == other.lengths.tolist() and one.reason is other.reason


@pytest.mark.parametrize(
    "bad", [{"min_gain": -0.1}, {"delay": -1}, {"explore_share": 1.0}, {"explore_every": 0}]
)
def test_bad_rules_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"min_gain|delayed|exploration"):
        Rule(**bad)  # type: ignore[arg-type]
