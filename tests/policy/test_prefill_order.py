"""Who goes first: hand-made cases, and the ageing bound on a stream of short prompts."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.policy.prefill_order import STRETCH, Claim, Order, rank

times = st.floats(0, 1e4)
works = st.floats(0, 100)
claims = st.builds(
    Claim,
    arrival=times,
    work=works,
    priority=st.integers(-3, 3),
    resumed=st.booleans(),
    ttft_target=st.none() | st.floats(0.001, 100),
)


def first(order: Order, *claims: Claim) -> int:
    return min(range(len(claims)), key=lambda i: rank(claims[i], order))


def test_first_come_first_served_ignores_length_and_priority() -> None:
    assert first(Order.FCFS, Claim(1.0, 9.0, priority=5), Claim(2.0, 0.1, priority=0)) == 0


def test_priority_goes_by_value_and_then_by_arrival() -> None:
    assert first(Order.PRIORITY, Claim(1.0, 0.1, priority=1), Claim(2.0, 9.0, priority=0)) == 1
    assert first(Order.PRIORITY, Claim(1.0, 9.0), Claim(2.0, 0.1)) == 0


def test_a_short_prompt_passes_a_long_one_that_came_before_it() -> None:
    assert first(Order.SHORTEST, Claim(0.0, 2.0), Claim(1.0, 0.1)) == 1


def test_priority_outranks_length() -> None:
    assert first(Order.SHORTEST, Claim(0.0, 2.0, priority=-1), Claim(1.0, 0.1)) == 0


@pytest.mark.parametrize("order", Order)
def test_one_that_owes_tokens_goes_before_all_that_do_not(order: Order) -> None:
    assert first(order, Claim(0.0, 0.1), Claim(9.0, 5.0, resumed=True)) == 1


def test_a_ttft_target_moves_a_prefill_forward_by_its_slack() -> None:
    """3 s of work that must be done by 4 s may start at 1 s: before one whose deadline is 1.6 s."""
    hurried = Claim(0.0, 3.0, ttft_target=4.0)
    assert rank(hurried, Order.SHORTEST)[2] == 1.0
    assert first(Order.SHORTEST, Claim(0.0, 0.2), hurried) == 1
    assert first(Order.SHORTEST, Claim(0.0, 0.1), hurried) == 0


@given(claims, st.floats(0.001, 100))
def test_a_target_never_moves_a_request_back(claim: Claim, target: float) -> None:
    without = Claim(claim.arrival, claim.work, claim.priority, claim.resumed)
    with_target = Claim(claim.arrival, claim.work, claim.priority, claim.resumed, target)
    for order in Order:
        assert rank(with_target, order) <= rank(without, order)


@given(times, works, works)
def test_progress_never_moves_a_request_back(arrival: float, work: float, done: float) -> None:
    assert rank(Claim(arrival, max(work - done, 0)), Order.SHORTEST) <= rank(
        Claim(arrival, work), Order.SHORTEST
    )


@given(claims, claims)
def test_nothing_that_arrives_after_the_deadline_goes_first(older: Claim, newer: Claim) -> None:
    """The ageing bound, for requests without targets, of one priority, that owe nothing."""
    old, new = Claim(older.arrival, older.work), Claim(newer.arrival, newer.work)
    if new.arrival > old.arrival + STRETCH * old.work:
        assert rank(old, Order.SHORTEST) < rank(new, Order.SHORTEST)


def serve(arrivals: list[Claim], quantum: float) -> dict[int, float]:
    """A machine that works on the first in rank, `quantum` seconds at a time. Returns when each ended."""
    left = {i: claim.work for i, claim in enumerate(arrivals)}
    ended: dict[int, float] = {}
    now = 0.0
    while left:
        here = [i for i in left if arrivals[i].arrival <= now]
        if not here:
            now = min(arrivals[i].arrival for i in left)
            continue
        chosen = min(here, key=lambda i: rank(Claim(arrivals[i].arrival, left[i]), Order.SHORTEST))
        spent = min(quantum, left[chosen])
        now += spent
        left[chosen] -= spent
        if left[chosen] <= 1e-12:
            del left[chosen]
            ended[chosen] = now
    return ended


def test_a_stream_of_short_prompts_against_one_long() -> None:
    """Shorts that keep the machine exactly busy for ever; the long one ends by its bound all the same."""
    long = Claim(0.0, 2.0)
    shorts = [Claim(0.1 * i - 1e-6, 0.1) for i in range(1_000)]
    ended = serve([long, *shorts], quantum=0.05)
    assert ended[0] <= STRETCH * 2.0 + 2.0 + 0.2
    waits = [ended[i + 1] - short.arrival for i, short in enumerate(shorts)]
    assert max(waits[:150]) <= 0.2  # until the long one's turn comes they wait for nobody but themselves


@given(
    st.lists(st.tuples(st.floats(0, 20), st.floats(0.01, 2)), min_size=1, max_size=25), st.floats(0.02, 0.5)
)
def test_every_request_ends_by_its_deadline_plus_the_work_that_had_arrived(
    pairs: list[tuple[float, float]], quantum: float
) -> None:
    arrivals = [Claim(arrival, work) for arrival, work in pairs]
    ended = serve(arrivals, quantum)
    for i, claim in enumerate(arrivals):
        deadline = claim.arrival + STRETCH * claim.work
        by_then = sum(other.work for other in arrivals if other.arrival <= deadline)
        assert ended[i] <= deadline + by_then + quantum + 1e-6


def test_mean_wait_is_far_below_first_come_first_served() -> None:
    """Nine short behind one long, all there at once: 2.5 s on average against 0.7 s."""
    claims = [Claim(0.0, 2.0), *[Claim(0.0, 0.1)] * 9]
    ended = serve(claims, quantum=0.05)
    queue = [(rank(c, Order.FCFS), i) for i, c in enumerate(claims)]
    heapq.heapify(queue)
    now, fcfs = 0.0, []
    while queue:
        now += claims[heapq.heappop(queue)[1]].work
        fcfs.append(now)
    assert sum(ended.values()) / 10 < 0.8 < 2.4 < sum(fcfs) / 10
