"""Per-key limits on a clock that the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.gateway.errors import ApiError
from vllm_deepinfer.gateway.limits.keys import ApiKey
from vllm_deepinfer.gateway.limits.rates import Bucket, RateLimits


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def key(**limits: int) -> ApiKey:
    return ApiKey(name="bob", sha256="0" * 64, **limits)  # type: ignore[arg-type]


def test_nobody_and_unlimited_keys_pass() -> None:
    limits = RateLimits(Clock())
    for _ in range(1000):
        limits.enter(None)
        limits.enter(key())
        limits.charge_prompt(None, 10**9)
        limits.charge_prompt(key(), 10**9)
    limits.leave(None, 5)


def test_requests_per_minute_refill_evenly() -> None:
    clock = Clock()
    limits, bob = RateLimits(clock), key(requests_per_minute=6)
    for _ in range(6):
        limits.enter(bob)
    with pytest.raises(ApiError, match="6 requests per minute") as caught:
        limits.enter(bob)
    assert caught.value.status == 429 and caught.value.retry_after_s == pytest.approx(10)
    clock.now += 9.9
    with pytest.raises(ApiError):
        limits.enter(bob)
    clock.now += 0.2
    limits.enter(bob)
    with pytest.raises(ApiError):
        limits.enter(bob)
    clock.now += 3600  # it holds a minute's worth, not an hour's
    for _ in range(6):
        limits.enter(bob)
    with pytest.raises(ApiError):
        limits.enter(bob)


def test_a_refused_request_costs_nothing() -> None:
    clock = Clock()
    limits, bob = RateLimits(clock), key(requests_per_minute=1)
    limits.enter(bob)
    for _ in range(100):
        with pytest.raises(ApiError):
            limits.enter(bob)
    clock.now += 60
    limits.enter(bob)


def test_tokens_per_minute_count_prompts_at_once_and_answers_afterwards() -> None:
    clock = Clock()
    limits, bob = RateLimits(clock), key(tokens_per_minute=600)
    limits.enter(bob)
    limits.charge_prompt(bob, 500)
    with pytest.raises(ApiError, match="600 tokens per minute") as caught:
        limits.charge_prompt(bob, 200)
    assert caught.value.retry_after_s == pytest.approx(10)  # 100 missing at 10 a second
    limits.leave(bob, 300)  # 200 below zero
    with pytest.raises(ApiError) as caught:
        limits.enter(bob)
    assert caught.value.retry_after_s == pytest.approx(20.1)
    clock.now += 20.2
    limits.enter(bob)


def test_a_prompt_over_a_minutes_worth_needs_a_full_bucket() -> None:
    clock = Clock()
    limits, bob = RateLimits(clock), key(tokens_per_minute=600)
    limits.charge_prompt(bob, 5000)
    clock.now += 60
    with pytest.raises(ApiError):
        limits.charge_prompt(bob, 5000)  # the debt of the first is being paid
    clock.now += 500
    limits.charge_prompt(bob, 5000)


def test_requests_at_once() -> None:
    limits, bob = RateLimits(Clock()), key(max_concurrent=2)
    limits.enter(bob)
    limits.enter(bob)
    with pytest.raises(ApiError, match="2 requests at once"):
        limits.enter(bob)
    limits.leave(bob, 0)
    limits.enter(bob)


def test_keys_do_not_share() -> None:
    limits = RateLimits(Clock())
    bob = key(requests_per_minute=1)
    eve = ApiKey(name="eve", sha256="1" * 64, requests_per_minute=1)
    limits.enter(bob)
    limits.enter(eve)
    with pytest.raises(ApiError):
        limits.enter(bob)


@given(
    per_minute=st.integers(1, 1000),
    steps=st.lists(st.tuples(st.floats(0, 100), st.integers(0, 300)), max_size=40),
)
def test_never_more_than_a_full_bucket_and_the_refill(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    """Whatever the order of waiting and asking: spent ≤ size + elapsed × rate."""
    bucket, now, spent = Bucket(per_minute, float(per_minute), 0.0), 0.0, 0
    for wait, amount in steps:
        now += wait
        bucket.refill(now)
        if amount <= per_minute and bucket.wait_s(amount) == 0:
            bucket.level -= amount
            spent += amount
        assert spent <= per_minute + now * per_minute / 60 + 1e-6
        assert bucket.level <= per_minute


@given(per_minute=st.integers(1, 1000), debt=st.floats(0, 5000), amount=st.integers(1, 1000))
def test_waiting_as_told_is_enough(per_minute: int, debt: float, amount: int) -> None:
    bucket = Bucket(per_minute, per_minute - debt, 0.0)
    bucket.refill(bucket.wait_s(amount) + 1e-6)
    assert bucket.wait_s(amount) <= 1e-5
