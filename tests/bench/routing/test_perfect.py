from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_deepinfer.bench.routing.perfect import balanced, decode_seconds, makespan, prefill_seconds
from vllm_deepinfer.bench.routing.system import simulated_of
from vllm_deepinfer.bench.routing.trace import Arrival
from vllm_deepinfer.policy.step_cost import StepCost

COST = StepCost(per_step=0.01, per_token=1e-4, per_decode=1e-3)


def heaviest(jobs: list[float], assigned: list[int], workers: int) -> float:
    return max(
        sum(job for job, one in zip(jobs, assigned, strict=True) if one == worker)
        for worker in range(workers)
    )


@settings(max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_the_heaviest_worker_is_within_a_third_of_the_best_assignment(sizes: list[int], workers: int) -> None:
    jobs = [float(size) for size in sizes]
    best = min(heaviest(jobs, list(one), workers) for one in product(range(workers), repeat=len(jobs)))
    found = heaviest(jobs, balanced(jobs, workers), workers)
    assert best <= found <= (4 / 3 - 1 / (3 * workers)) * best + 1e-9  # Graham, 1969


def test_equal_jobs_are_dealt_out_evenly() -> None:
    assert sorted(balanced([1.0] * 8, 4)) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert balanced([], 3) == []


def test_without_workers_nothing_can_be_assigned() -> None:
    with pytest.raises(ValueError, match="need at least one worker"):
        balanced([1.0], 0)


def test_the_work_of_a_request_by_hand() -> None:
    arrival = Arrival(0.0, prompt_tokens=1000, answer_tokens=50, session=0)
    assert prefill_seconds(COST, arrival) == pytest.approx(0.01 + 0.1)
    assert decode_seconds(COST, arrival) == pytest.approx(50 * 1e-3)


def test_one_request_takes_its_prefill_and_a_step_per_token() -> None:
    arrivals = [Arrival(0.0, prompt_tokens=1000, answer_tokens=5, session=0)]
    seconds = makespan(arrivals, {"aggregated": (2, COST)}, simulated_of)
    assert seconds == pytest.approx(0.11 + 4 * 0.011)


def test_twice_the_workers_are_nearly_twice_as_fast() -> None:
    arrivals = [Arrival(0.0, 500, 20, 0) for _ in range(64)]
    two, four = (makespan(arrivals, {"aggregated": (n, COST)}, simulated_of) for n in (2, 4))
    assert 0.45 < four / two < 0.7


def test_prefill_and_decode_pools_hand_over_in_virtual_time() -> None:
    arrivals = [Arrival(0.1 * number, 500, 10, 0) for number in range(10)]
    pools = {"prefill": (2, COST), "decode": (2, COST)}
    seconds = makespan(arrivals, pools, simulated_of)
    assert 0.9 + 0.06 < seconds < 0.9 + 0.06 + 0.5
