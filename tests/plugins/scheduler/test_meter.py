"""Times of steps, sync and overlapping, and what they teach."""

from __future__ import annotations

import math

import pytest
from vllm_deepinfer_plugins.scheduler.meter import IN_FLIGHT, Meter, Record

from vllm_deepinfer.policy.itl_control import ItlControl
from vllm_deepinfer.policy.prefill_budget import StepBudget
from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE, Features, StepCost
from vllm_deepinfer.policy.step_cost_learner import StepCostLearner

DECODE = Features(decodes=4, decode_context=4_000)


def meter() -> Meter:
    return Meter(StepCostLearner(StepCost(0, 0, tile=32), TWO_CORE_DENSE), ItlControl())


def record(started: float, decodes: int = 4, chunks: tuple[int, ...] = (), plain: bool = True) -> Record:
    features = Features(tokens=sum(chunks), decodes=decodes, decode_context=4_000.0)
    return Record(started, features, TWO_CORE_DENSE.seconds(features), 0.03, decodes, list(chunks), plain)


def test_a_step_takes_from_start_to_end_and_a_token_from_end_to_end() -> None:
    clock = meter()
    clock.began(1, record(10.0))
    first = clock.ended(1, 10.5)
    clock.began(2, record(10.6))
    second = clock.ended(2, 11.0)
    assert first is not None and second is not None
    assert (first.actual, first.period) == pytest.approx((0.5, 0.5))
    assert (second.actual, second.period) == pytest.approx((0.4, 0.5))


def test_overlapping_steps_begin_when_the_one_before_ends() -> None:
    """Asynchronous scheduling: handed over at 0 and 0.1, back at 1.0 and 1.7."""
    clock = meter()
    clock.began(1, record(0.0))
    clock.began(2, record(0.1))
    assert clock.ended(1, 1.0) is not None
    second = clock.ended(2, 1.7)
    assert second is not None and second.actual == pytest.approx(0.7)


def test_after_idle_time_nobody_has_waited() -> None:
    clock = meter()
    clock.began(1, record(0.0))
    clock.ended(1, 1.0)
    clock.began(2, record(60.0, decodes=0, chunks=(100,)))
    second = clock.ended(2, 60.2)
    assert second is not None and (second.actual, second.period) == pytest.approx((0.2, 0.2))


def test_an_unknown_step_is_none_and_lost_ones_are_forgotten() -> None:
    clock = meter()
    assert clock.ended(7, 1.0) is None
    for key in range(IN_FLIGHT + 5):
        clock.began(key, record(0.0))
    assert clock.ended(4, 1.0) is None
    assert clock.ended(5, 1.0) is not None


def test_only_plain_steps_teach_the_cost_model() -> None:
    clock = meter()
    for key in range(60):
        clock.began(key, record(float(key), plain=False))
        clock.ended(key, key + 0.9)
    assert clock.learner.error is None
    for key in range(60):
        clock.began(key, record(100.0 + key))
        clock.ended(key, 100.0 + key + 2 * TWO_CORE_DENSE.seconds(DECODE))
    assert clock.learner.predict(DECODE) == pytest.approx(2 * TWO_CORE_DENSE.seconds(DECODE), rel=0.01)


def test_steps_that_hardly_use_their_budget_or_have_no_decodes_do_not_correct_it() -> None:
    clock = meter()
    for key, (chunks, decodes) in enumerate([((), 4), ((600,), 0)] * 100):
        clock.began(key, record(float(key), chunks=chunks, decodes=decodes))
        clock.ended(key, key + 0.9)
    assert clock.control.corrections == 0


def test_the_margin_is_what_steps_take_over_what_was_predicted() -> None:
    clock = meter()
    for key in range(200):
        clock.began(key, record(0.06 * key, chunks=(500,)))
        clock.ended(key, 0.06 * (key + 1))
    assert clock.control.corrections > 0
    assert math.isclose(clock.control.margin, 0.06 / record(0, chunks=(500,)).predicted, rel_tol=0.02)


def test_a_margin_that_leaves_no_room_for_a_chunk_is_unlearned() -> None:
    """After contention the decodes alone exceed the budget: decode steps must be enough to win it back."""
    clock, now, sizes = meter(), 0.0, []
    for number in range(1_000):
        limit = clock.control.budget(0.022)
        chunk = StepBudget(clock.learner.cost(), DECODE, limit, 8_192).chunk(0, 5_000)
        features = DECODE + Features(tokens=chunk)
        predicted = clock.learner.predict(features)
        chunks = [chunk] if chunk else []
        clock.began(number, Record(now, features, predicted, limit, 4, chunks, True))
        contended = 200 <= number < 260 and number % 7 < 2
        now += (4.0 if contended else 1.0) * TWO_CORE_DENSE.seconds(features)
        clock.ended(number, now)
        sizes.append(chunk)
    assert sizes[190] >= 200
    assert 0 in sizes[200:400]  # it did go that far
    assert min(sizes[500:]) >= 200
