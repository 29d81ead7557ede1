"""The fit: exact without noise, close with it, unmoved by stalls, never negative."""

from __future__ import annotations

import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE, AttentionBound, Features, StepCost, Work
from vllm_deepinfer.policy.step_cost_fit import COEFFICIENTS, fit
from vllm_deepinfer.policy.step_samples import Sample

EMPTY = StepCost(0.0, 0.0, tile=32)


def steps(seed: int, count: int, cost: StepCost = TWO_CORE_DENSE) -> list[Features]:
    rng = random.Random(seed)
    batches = [
        [Work(rng.randrange(20_000), prefill_tokens=rng.choice([32, 64, 100, 256, 512]))]
        * rng.choice([0, 1, 1, 2])
        + [Work(rng.randrange(8_000)) for _ in range(rng.choice([1, 4, 16]))]
        for _ in range(count)
    ]
    return [sum((cost.features(work) for work in batch), Features()) for batch in batches]


def samples(seed: int, count: int, noise: float, stalls: float = 0.0) -> list[Sample]:
    rng = random.Random(seed + 1)
    return [
        Sample(
            features,
            TWO_CORE_DENSE.seconds(features)
            * rng.lognormvariate(0, noise)
            * (rng.uniform(3, 40) if rng.random() < stalls else 1),
            number,
        )
        for number, features in enumerate(steps(seed, count))
    ]


def errors(cost: StepCost, seed: int = 99) -> list[float]:
    truth = [(f, TWO_CORE_DENSE.seconds(f)) for f in steps(seed, 300)]
    return sorted(abs(cost.seconds(f) - t) / t for f, t in truth)


def test_noise_free_samples_give_the_coefficients_back() -> None:
    found = fit(samples(0, 300, 0.0), TWO_CORE_DENSE)
    for name in COEFFICIENTS:
        assert getattr(found, name) == pytest.approx(getattr(TWO_CORE_DENSE, name), rel=1e-6)


def test_from_nothing_the_ridge_costs_less_than_two_per_cent() -> None:
    assert errors(fit(samples(0, 300, 0.0), EMPTY))[285] < 0.02


@pytest.mark.parametrize("seed", range(5))
def test_with_noise_and_stalls_held_out_steps_are_within_the_issue_s_bounds(seed: int) -> None:
    found = errors(fit(samples(seed, 400, 0.05, stalls=0.05), EMPTY))
    assert median(found) <= 0.05 and found[285] <= 0.15


@given(st.lists(st.tuples(st.integers(0, 300), st.floats(1e-4, 10)), min_size=1, max_size=40))
def test_never_negative_whatever_is_measured(pairs: list[tuple[int, float]]) -> None:
    """Non-negative coefficients are what makes every prediction monotone."""
    known = steps(5, 301)
    found = fit([Sample(known[i], seconds, n) for n, (i, seconds) in enumerate(pairs)], EMPTY)
    assert all(getattr(found, name) >= 0 for name in COEFFICIENTS)


def test_what_the_samples_do_not_show_stays_as_it_was() -> None:
    """Decode-only steps say nothing about prefill: its coefficients are kept."""
    decodes = [Features(decodes=d, decode_context=d * 700.0 * (d % 3)) for d in range(1, 17)]
    found = fit([Sample(f, 2 * TWO_CORE_DENSE.seconds(f), n) for n, f in enumerate(decodes)], TWO_CORE_DENSE)
    for name in ("per_token", "per_pair", "per_prefill_context"):
        assert getattr(found, name) == pytest.approx(getattr(TWO_CORE_DENSE, name))
    doubled = 2 * TWO_CORE_DENSE.seconds(Features(decodes=8, decode_context=8_000))
    assert found.seconds(Features(decodes=8, decode_context=8_000)) == pytest.approx(doubled, rel=0.05)


def test_new_samples_outweigh_old_ones() -> None:
    """A machine that has become half as fast, 3,000 steps ago and since."""
    features = steps(3, 200)
    old = [Sample(f, TWO_CORE_DENSE.seconds(f), n) for n, f in enumerate(features)]
    new = [Sample(f, 2 * TWO_CORE_DENSE.seconds(f), n + 4_000) for n, f in enumerate(features)]
    found = fit(old + new, TWO_CORE_DENSE)
    ratios = sorted(found.seconds(f) / TWO_CORE_DENSE.seconds(f) for f in features)
    assert 1.7 < ratios[100] <= 2.05


def test_bound_and_tile_are_the_prior_s() -> None:
    prior = StepCost(0, 0, attention=AttentionBound(window=128, top_k=64), tile=16)
    found = fit(samples(0, 50, 0.0), prior)
    assert (found.attention, found.tile) == (prior.attention, 16)


def test_no_samples() -> None:
    with pytest.raises(ValueError, match="no samples"):
        fit([], EMPTY)
