"""The choice with its surroundings: confidences or none, costs or none, and what is learned and counted."""

from __future__ import annotations

import math

import numpy as np
import pytest
from vllm_deepinfer_plugins.verification.judge import Judge

from vllm_deepinfer.policy.step_cost import Features, StepCost
from vllm_deepinfer.policy.verification_control import Decision, Reason, Rule

CHEAP = StepCost(per_step=10e-3, per_token=0.1e-3, per_decode=0.1e-3)
DEAR = StepCost(per_step=10e-3, per_token=2e-3, per_decode=2e-3)
STILL = Rule(explore_share=0.0)


def choose(judge: Judge, step: StepCost | None, confidences: list[list[float]], times: int = 4) -> Decision:
    """The decision once confidences are old enough."""
    keys = [f"r{row}" for row in range(len(confidences))]
    for _ in range(times):
        for key, own in zip(keys, confidences, strict=True):
            judge.drafted(key, own)
        decision = judge.choose(keys, [100] * len(keys), [len(own) or 3 for own in confidences], step)
    return decision


def test_a_cheap_draft_is_verified_and_a_dear_one_only_if_it_is_likely() -> None:
    both = [[0.9, 0.9, 0.9], [0.05, 0.05, 0.05]]
    assert choose(Judge(3, STILL), CHEAP, both).lengths.tolist()[0] == 3
    assert choose(Judge(3, STILL), DEAR, both).lengths.tolist() == [3, 0]


def test_without_a_cost_everything_is_verified_counted_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    judge = Judge(3, STILL)
    decision = choose(judge, None, [[0.01, 0.01, 0.01]])
    assert decision.lengths.tolist() == [3] and decision.reason is Reason.NO_COST
    assert judge.counts.totals == {"steps:no_cost": 4, "budget": 12}
    assert len([r for r in caplog.records if "All drafts are verified" in r.message]) == 1


def test_a_confidence_that_is_not_a_number_verifies_everything() -> None:
    judge = Judge(3, STILL)
    decision = choose(judge, CHEAP, [[0.9, math.nan, 0.9]])
    assert decision.lengths.tolist() == [3] and decision.reason is Reason.NOT_A_NUMBER
    assert judge.counts.totals["steps:not_a_number"] == 4


def test_a_drafter_without_confidences_is_judged_by_what_was_accepted() -> None:
    judge = Judge(3, STILL)
    for _ in range(40):
        judge.verified(["r0", "r1"], [3, 3], [3, 0])
    decision = choose(judge, DEAR, [[], []], times=1)
    assert decision.lengths.tolist() == [3, 0] and decision.reason is Reason.SCHEDULED
    assert judge.counts.positions["verified", 2] == 80 and judge.counts.positions["accepted", 2] == 40


def test_confidences_are_calibrated_from_what_happens_to_them() -> None:
    """Drafts of 0.9 that hold every other time: after a refit they are taken for what they are."""
    judge, random = Judge(2, STILL), np.random.default_rng(0)
    keys = [f"r{row}" for row in range(64)]
    for _ in range(64):
        for key in keys:
            judge.drafted(key, [0.9, 0.9])
        kept = random.random((64, 2)) < 0.5
        judge.verified(keys, [2] * 64, np.cumprod(kept, axis=1).sum(axis=1).tolist())
    counts = judge.counts
    assert counts.totals["refits"] >= 2 and counts.totals["adopted"] >= 1
    assert counts.positions["ece_before", 0] > 350_000
    assert counts.positions["ece_after", 0] < 150_000


def test_what_rows_cost_beyond_the_step_cost_is_learned() -> None:
    """Steps of more than four rows take twice as long: drafts beyond them are no bargain any more."""
    judge = Judge(3, STILL)
    assert choose(judge, CHEAP, [[0.6, 0.6, 0.6]] * 2).lengths.sum() == 6
    for rows in range(2, 9):
        for _ in range(30):
            features = Features(tokens=rows - 2, decodes=2)
            seconds = CHEAP.seconds(features) * (1 if rows <= 4 else 1.9)
            judge.took(rows, CHEAP, features, seconds)
    assert choose(judge, CHEAP, [[0.6, 0.6, 0.6]] * 2).lengths.sum() == 2


def test_a_limit_holds() -> None:
    judge = Judge(3, STILL)
    choose(judge, CHEAP, [[0.9] * 3] * 4)
    decision = judge.choose(
        [f"r{row}" for row in range(4)], [100] * 4, [3] * 4, CHEAP, limit=CHEAP.seconds(Features(5, 0, 4))
    )
    assert decision.lengths.sum() == 5


def test_a_request_that_has_ended_is_forgotten() -> None:
    judge = Judge(3, STILL)
    judge.drafted("r0", [0.9, 0.9, 0.9])
    judge.forget("r0")
    judge.verified(["r0"], [3], [1])
    assert judge.choose(["r0"], [10], [3], None).lengths.tolist() == [3]
