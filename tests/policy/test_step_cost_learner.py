"""The learner: what it says before it knows anything, and what drift, stalls and contention do to it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE, Features, StepCost, Work
from vllm_deepinfer.policy.step_cost_fit import COEFFICIENTS
from vllm_deepinfer.policy.step_cost_learner import LEAST_SAMPLES, RECENT, WARM_UP, StepCostLearner, scaled

EMPTY = StepCost(0.0, 0.0, tile=32)
FULL = TWO_CORE_DENSE.features(Work(4_000, prefill_tokens=256)) + Features(decodes=4, decode_context=8_000)


def a_step(rng: random.Random) -> Features:
    chunk = rng.choice([0, 32, 64, 128, 256, 512])
    decodes = rng.choice([1, 4, 16])
    features = Features(decodes=decodes, decode_context=decodes * rng.randrange(8_000))
    return (
        features + TWO_CORE_DENSE.features(Work(rng.randrange(16_000), prefill_tokens=chunk))
        if chunk
        else features
    )


def teach(
    learner: StepCostLearner,
    count: int,
    slower: Callable[[int], float] = lambda _: 1.0,
    seed: int = 0,
    noise: float = 0.04,
) -> None:
    rng = random.Random(seed)
    for number in range(count):
        features = a_step(rng)
        learner.observe(
            features, TWO_CORE_DENSE.seconds(features) * rng.lognormvariate(0, noise) * slower(number)
        )


def ratio(learner: StepCostLearner, features: Features = FULL) -> float:
    return learner.predict(features) / TWO_CORE_DENSE.seconds(features)


def test_at_first_it_knows_nothing_and_says_so() -> None:
    learner = StepCostLearner(EMPTY)
    assert not learner.usable and learner.error is None and learner.refits == 0


def test_one_shape_is_not_enough_however_often_it_comes() -> None:
    learner = StepCostLearner(EMPTY)
    for _ in range(500):
        learner.observe(FULL, 0.05)
    assert not learner.usable


def test_a_few_dozen_steps_are_enough() -> None:
    learner = StepCostLearner(EMPTY)
    teach(learner, WARM_UP + LEAST_SAMPLES + 8)
    assert learner.usable
    assert 0.8 < ratio(learner) < 1.25


def test_a_known_fit_is_usable_at_once() -> None:
    learner = StepCostLearner(EMPTY, TWO_CORE_DENSE)
    assert learner.usable and learner.predict(FULL) == TWO_CORE_DENSE.seconds(FULL)


def test_its_error_is_that_of_predictions_made_before() -> None:
    learner = StepCostLearner(EMPTY)
    teach(learner, 1_500)
    assert learner.error is not None
    assert learner.error.median <= 0.05 and learner.error.p95 <= 0.15


def test_first_steps_do_not_count() -> None:
    learner = StepCostLearner(EMPTY, TWO_CORE_DENSE)
    for _ in range(WARM_UP):
        learner.observe(FULL, 3.0)
    assert learner.error is None
    assert learner.predict(FULL) == TWO_CORE_DENSE.seconds(FULL)


@pytest.mark.parametrize("factor", [0.6, 1.26, 2.5])
def test_drift_is_followed_within_one_window(factor: float) -> None:
    learner = StepCostLearner(EMPTY, TWO_CORE_DENSE)
    teach(learner, 300)
    teach(learner, 3 * RECENT, lambda _: factor, seed=1)
    assert ratio(learner) == pytest.approx(factor, rel=0.08)


def test_a_stall_is_forgotten_at_once() -> None:
    learner = StepCostLearner(EMPTY, TWO_CORE_DENSE)
    teach(learner, 300)
    before = ratio(learner)
    learner.observe(FULL, 100 * TWO_CORE_DENSE.seconds(FULL))
    assert ratio(learner) == pytest.approx(before, rel=0.02)


def test_stalls_every_twenty_steps_do_not_pull_it_up() -> None:
    learner = StepCostLearner(EMPTY)
    teach(learner, 2_000, lambda number: 25.0 if number % 20 == 0 else 1.0)
    assert ratio(learner) == pytest.approx(1.0, rel=0.1)


def test_after_contention_it_recovers_however_long_that_lasted() -> None:
    """Bug class 32c: a time-sized chunk that shrinks for ever because contended samples feed it."""
    learner = StepCostLearner(EMPTY)
    teach(learner, 300)
    teach(learner, 2_000, lambda _: 4.0, seed=1)
    assert ratio(learner) == pytest.approx(4.0, rel=0.1)
    teach(learner, 3 * RECENT, seed=2)
    assert ratio(learner) == pytest.approx(1.0, rel=0.15)


def test_decodes_alone_do_not_correct_prefill() -> None:
    learner = StepCostLearner(EMPTY, TWO_CORE_DENSE)
    decode = Features(decodes=4, decode_context=8_000)
    for _ in range(60):
        learner.observe(decode, 2 * TWO_CORE_DENSE.seconds(decode))
    assert ratio(learner, decode) == pytest.approx(2.0)
    assert ratio(learner) == pytest.approx(1.0)


def test_a_context_never_seen_before_is_learned_within_a_prompt() -> None:
    """Short prompts for a thousand steps, then a long one: the contexts' coefficients were unknown."""
    learner, rng = StepCostLearner(EMPTY), random.Random(3)
    for _ in range(1_000):
        short = TWO_CORE_DENSE.features(Work(0, prefill_tokens=rng.choice([32, 64, 128, 256, 512])))
        features = short + Features(decodes=4, decode_context=2_000)
        learner.observe(features, TWO_CORE_DENSE.seconds(features) * rng.lognormvariate(0, 0.03))
    off = []
    for context in range(0, 16_000, 256):
        features = TWO_CORE_DENSE.features(Work(context, prefill_tokens=256)) + Features(4, 0, 4, 2_000)
        off.append(abs(learner.predict(features) / TWO_CORE_DENSE.seconds(features) - 1))
        learner.observe(features, TWO_CORE_DENSE.seconds(features) * rng.lognormvariate(0, 0.03))
    assert max(off[20:]) < 0.25 and sum(off[20:]) / len(off[20:]) < 0.1


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_clock_that_did_not_move_teaches_nothing(seconds: float) -> None:
    learner = StepCostLearner(EMPTY, TWO_CORE_DENSE)
    for _ in range(50):
        assert not learner.observe(FULL, seconds)
    assert learner.predict(FULL) == TWO_CORE_DENSE.seconds(FULL)


def test_an_empty_step_teaches_nothing() -> None:
    learner = StepCostLearner(EMPTY, TWO_CORE_DENSE)
    for _ in range(50):
        learner.observe(Features(), 1.0)
    assert learner.error is None


def test_a_learner_takes_bounded_memory() -> None:
    learner = StepCostLearner(EMPTY)
    teach(learner, 5_000)
    assert len(learner._samples.all()) <= 12 * 64


def test_scaled() -> None:
    double = scaled(TWO_CORE_DENSE, 2.0)
    assert all(getattr(double, n) == 2 * getattr(TWO_CORE_DENSE, n) for n in COEFFICIENTS)
    assert double.tile == TWO_CORE_DENSE.tile
