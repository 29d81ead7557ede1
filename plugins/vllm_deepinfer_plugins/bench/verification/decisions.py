"""How long one decision takes: what the scheduler asks the judge for 256 requests with five drafts each."""

from __future__ import annotations

import time

import numpy as np

from vllm_deepinfer.policy.step_cost import AttentionBound, StepCost
from vllm_deepinfer.policy.verification_control import Drafts, Rule, Verifier
from vllm_deepinfer.policy.verification_cost import RoundCost, RowResiduals

from ...verification.judge import Judge

REQUESTS, POSITIONS = 256, 5
COST = StepCost(
    per_step=7e-3,
    per_token=40e-6,
    per_pair=10e-9,
    per_decode=0.28e-3,
    per_decode_context=0.12e-6,
    attention=AttentionBound(window=128, top_k=512),
)


def times(repeats: int, seed: int = 0) -> tuple[list[float], list[float]]:
    """Milliseconds of decisions of the policy, and of the judge with its table of requests around it.

    Confidences change from step to step, and contexts differ: nothing can be taken from the step before.
    """
    rng = np.random.default_rng(seed)
    keys = [f"request-{number}" for number in range(REQUESTS)]
    contexts = rng.integers(10, 8_000, REQUESTS)
    drafted = np.full(REQUESTS, POSITIONS, np.int64)
    residuals = RowResiduals()
    for rows in (1, 64, 256, 700, 1_536):
        for _ in range(8):
            residuals.observe(rows, 1.0, 1.0 + 0.1 * rng.random())
    verifier, judge = Verifier(Rule()), Judge(POSITIONS)
    policy, whole = [], []
    for _ in range(repeats):
        confidences = rng.beta(2.0, 1.0, (REQUESTS, POSITIONS))
        drafts = Drafts(keys, contexts.astype(np.float64), drafted, confidences)
        begin = time.perf_counter()
        verifier.decide(drafts, RoundCost(COST, residuals=residuals))
        policy.append(1e3 * (time.perf_counter() - begin))
        for key, own in zip(keys, confidences.tolist(), strict=True):
            judge.drafted(key, own)
        begin = time.perf_counter()
        judge.choose(keys, contexts.tolist(), drafted.tolist(), COST)
        whole.append(1e3 * (time.perf_counter() - begin))
    return policy[3:], whole[3:]  # the first ones have no history and decide nothing
