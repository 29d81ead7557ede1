"""What a step answers to vLLM's hook."""

from __future__ import annotations

import math
from collections.abc import Mapping

from vllm_deepinfer_plugins.scheduler.step import Step

from vllm_deepinfer.policy.prefill_budget import StepBudget
from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE, Features

DECODES = Features(decodes=4, decode_context=8_000)


def step(plan: Mapping[str, int] | None, limit: float = 0.04, forced: bool = False, cap: int = 8_192) -> Step:
    return Step(StepBudget(TWO_CORE_DENSE, DECODES, limit, cap), plan, forced, 4, limit)


def test_running_prefills_get_what_was_planned_and_the_rest_waits() -> None:
    made = step({"a": 256, "c": 64})
    assert [made.running(key, 1_000) for key in "abc"] == [256, 0, 64]
    assert made.running("a", 100) == 100


def test_waiting_ones_get_what_is_left_at_their_own_context() -> None:
    made = step({"new": 128})
    assert made.waiting("new", 0, 30_000) == 668  # nothing charged yet
    made.charge("a", 0, 320)
    near = made.waiting("new", 0, 30_000)
    assert 0 < near < 672 - 256 and (4 + 320 + near) % 32 == 0
    assert made.waiting("new", 4_096, 30_000) < near


def test_a_hit_that_the_plan_did_not_know_of_is_cheaper() -> None:
    """Planned as 5,000 tokens, of which 4,900 turn out to be cached: all of the rest fits."""
    assert step({"new": 600}).waiting("new", 4_900, 100) == 100


def test_charging_adds_up() -> None:
    made = step({"a": 256})
    made.charge("a", 1_000, 256)
    made.charge("b", 0, 0)
    assert made.chunks == {"a": 256}
    assert made.live.used.tokens == 256 and made.live.used.prefill_context == 1_000
    made.decode(Features(decodes=1, decode_context=50))
    assert made.decodes == 5 and made.live.used.decode_context == 8_050


def test_a_forced_step_gives_a_waiting_prefill_what_was_planned_for_it() -> None:
    over = step({"new": 32}, limit=0.001, forced=True)
    assert over.waiting("new", 0, 5_000) == 32
    assert over.waiting("other", 0, 5_000) == 0
    assert step({"new": 32}, limit=0.001).waiting("new", 0, 5_000) == 0


def test_a_second_chunk_that_costs_more_to_start_than_to_compute_is_left_alone() -> None:
    made = step({}, limit=0.026)
    made.charge("near", 0, 1)
    assert made.live.chunk(16_384, 9_000) > 0
    assert made.waiting("far", 16_384, 9_000) == 0


def test_without_a_plan_nothing_is_cut_but_to_the_cap() -> None:
    stock = step(None, math.inf)
    assert (stock.running("a", 5_000), stock.waiting("b", 0, 5_000)) == (5_000, 5_000)
    probe = step(None, math.inf, cap=64)
    assert probe.running("a", 5_000) == 64
    probe.charge("a", 0, 64)
    assert (probe.running("b", 10), probe.waiting("c", 0, 10)) == (0, 0)
