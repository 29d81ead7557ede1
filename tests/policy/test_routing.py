"""Routing against oracles: exhaustive search, Graham's bound, and capacity that must never be exceeded."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.policy.routing import (
    Choice,
    DecodeCost,
    DecodeLoad,
    Ledger,
    Marks,
    PrefillLoad,
    Staleness,
    choose_decode,
    choose_prefill,
)

COST = DecodeCost(per_request=1e-3, per_kv_token=1e-6)


def decode(active: int = 0, tokens: int = 0, at: float = 0.0, accepted: int = 0) -> DecodeLoad:
    return DecodeLoad(active, tokens, most_active=4, most_kv_tokens=1000, at=at, accepted=accepted)


# Prefill


def test_the_least_outstanding_work_wins() -> None:
    loads = {"a": PrefillLoad(3.0, 10.0), "b": PrefillLoad(1.0, 10.0), "c": PrefillLoad(2.0, 10.0)}
    assert choose_prefill(loads, 0.5, Ledger(), 10.0) == Choice("b", 1.5)


def test_work_is_done_while_no_load_arrives() -> None:
    """a said 3 s two seconds ago, b 1.5 s just now: a will be free first."""
    loads = {"a": PrefillLoad(3.0, 8.0), "b": PrefillLoad(1.5, 10.0)}
    assert choose_prefill(loads, 0.5, Ledger(), 10.0) == Choice("a", 1.5)


def test_what_was_assigned_is_done_after_what_was_held() -> None:
    """1 s held at 0, 2 s more at 4 (the worker idled from 1 to 4): at 5 one second is left."""
    ledger = Ledger()
    ledger.assign("a", 4.0, prefill_s=2.0)
    choice = choose_prefill({"a": PrefillLoad(1.0, 0.0)}, 0.5, ledger, 5.0, staleness=Staleness(10.0))
    assert choice == Choice("a", 1.5)


def test_a_faster_worker_may_be_worth_waiting_for() -> None:
    loads = {"slow": PrefillLoad(0.0, 0.0), "fast": PrefillLoad(1.0, 0.0)}
    assert choose_prefill(loads, {"slow": 4.0, "fast": 1.0}, Ledger(), 0.0) == Choice("fast", 2.0)


def test_a_burst_between_two_loads_is_spread() -> None:
    loads = {name: PrefillLoad(0.0, 0.0) for name in "abc"}
    ledger, taken = Ledger(), dict.fromkeys("abc", 0)
    for _ in range(9):
        choice = choose_prefill(loads, 1.0, ledger, 0.0)
        assert choice is not None
        ledger.assign(choice.worker, 0.0, prefill_s=1.0)
        taken[choice.worker] += 1
    assert taken == {"a": 3, "b": 3, "c": 3}


def test_a_silent_worker_comes_last_and_the_choice_says_so() -> None:
    loads = {"silent": PrefillLoad(0.0, 0.0), "busy": PrefillLoad(50.0, 10.0)}
    assert choose_prefill(loads, 1.0, Ledger(), 10.0) == Choice("busy", 51.0)
    alone = choose_prefill({"silent": loads["silent"]}, 1.0, Ledger(), 10.0)
    assert alone == Choice("silent", 1.0, stale=True)


def test_silent_workers_are_ranked_by_what_they_were_given() -> None:
    loads, ledger = {"a": PrefillLoad(9.0, 0.0), "b": PrefillLoad(0.0, 0.0)}, Ledger()
    ledger.assign("b", 9.0, prefill_s=2.0)
    assert choose_prefill(loads, 1.0, ledger, 10.0) == Choice("a", 1.0, stale=True)


def test_marked_workers_come_last_but_are_better_than_none() -> None:
    loads = {"a": PrefillLoad(0.0, 0.0), "b": PrefillLoad(5.0, 0.0)}
    assert choose_prefill(loads, 1.0, Ledger(), 0.0, marked=frozenset("a")) == Choice("b", 6.0)
    assert choose_prefill(loads, 1.0, Ledger(), 0.0, marked=frozenset("ab")) == Choice("a", 1.0, marked=True)


def test_no_worker() -> None:
    assert choose_prefill({}, 1.0, Ledger(), 0.0) is None
    assert choose_decode({}, 1, COST, Ledger(), 0.0) is None


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.integers(1, 3))
def test_at_most_grahams_bound_above_the_best_assignment(jobs: list[float], workers: int) -> None:
    """Work that arrives at once is list scheduling: makespan ≤ (2 − 1/m) × the best (Graham, 1966)."""
    names = [f"w{at}" for at in range(workers)]
    loads, ledger, held = {name: PrefillLoad(0.0, 0.0) for name in names}, Ledger(), dict.fromkeys(names, 0.0)
    for job in jobs:
        choice = choose_prefill(loads, job, ledger, 0.0)
        assert choice is not None
        ledger.assign(choice.worker, 0.0, prefill_s=job)
        held[choice.worker] += job
        assert choice.cost_s == pytest.approx(held[choice.worker])
    best = min(
        max(sum(job for job, at in zip(jobs, where, strict=True) if at == w) for w in range(workers))
        for where in product(range(workers), repeat=len(jobs))
    )
    assert max(held.values()) <= (2 - 1 / workers) * best * (1 + 1e-9)


# Decode


def test_the_shortest_next_step_wins() -> None:
    """Few long requests against many short ones: 3 ms + 0.5 ms, or 2 ms + 0.9 ms."""
    loads = {"many": decode(active=2, tokens=400), "long": decode(active=1, tokens=800)}
    choice = choose_decode(loads, 100, COST, Ledger(), 0.0)
    assert choice is not None and choice.worker == "long"
    assert choice.cost_s == pytest.approx(2e-3 + 900e-6)


@pytest.mark.parametrize(
    ("load", "tokens", "fits"),
    [
        (decode(active=3), 1, True),
        (decode(active=4), 1, False),
        (decode(tokens=900), 100, True),
        (decode(tokens=900), 101, False),
    ],
)
def test_never_beyond_capacity(load: DecodeLoad, tokens: int, fits: bool) -> None:
    assert (choose_decode({"a": load}, tokens, COST, Ledger(), 0.0) is not None) == fits


def test_what_is_on_its_way_counts_against_capacity() -> None:
    loads, ledger = {"a": decode(active=2)}, Ledger()
    for _ in range(2):
        ledger.assign("a", 0.0, kv_tokens=10)
    assert choose_decode(loads, 10, COST, ledger, 0.0) is None


requests = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 3)), max_size=40)


@given(requests, st.integers(1, 3))
def test_capacity_holds_over_arrivals_and_late_loads(arrivals: list[tuple[int, int]], workers: int) -> None:
    """Loads come late and count what has arrived; no worker's true load may ever pass its limit."""
    names = [f"w{at}" for at in range(workers)]
    truth: dict[str, list[int]] = {name: [] for name in names}
    loads, ledger = {name: decode() for name in names}, Ledger()
    for now, (tokens, report) in enumerate(arrivals):
        choice = choose_decode(loads, tokens, COST, ledger, float(now))
        if choice is None:
            full = [len(held) + 1 > 4 or sum(held) + tokens > 1000 for held in truth.values()]
            assert all(full), "refused although a worker had room"
        else:
            made = ledger.assign(choice.worker, float(now), kv_tokens=tokens)
            truth[choice.worker].append(tokens)
            assert len(truth[choice.worker]) <= 4 and sum(truth[choice.worker]) <= 1000
            if report < workers:  # one worker reports, with everything that it was given so far
                name, held = names[report], truth[names[report]]
                loads[name] = decode(len(held), sum(held), float(now), made.number)
                ledger.settle(name, made.number)


def test_marks_and_staleness_for_decode() -> None:
    loads = {"a": decode(at=0.0), "b": decode(active=3, at=10.0)}
    fresh = choose_decode(loads, 1, COST, Ledger(), 10.0)
    assert fresh is not None and (fresh.worker, fresh.stale) == ("b", False)
    silent = choose_decode(loads, 1, COST, Ledger(), 10.0, marked=frozenset("b"))
    assert silent is not None and (silent.worker, silent.stale, silent.marked) == ("a", True, False)


# Ledger, marks, staleness


def test_a_load_settles_what_it_counts() -> None:
    ledger = Ledger()
    first, second = ledger.assign("a", 0.0, prefill_s=1.0), ledger.assign("a", 0.0, prefill_s=2.0)
    ledger.settle("a", first.number)
    assert ledger.open("a", 0.0) == (second,)
    ledger.forget("a", second.number)
    assert ledger.open("a", 0.0) == ()


def test_an_assignment_that_never_arrives_is_given_up() -> None:
    ledger = Ledger(lost_after_s=5.0)
    ledger.assign("a", 0.0)
    assert len(ledger.open("a", 5.0)) == 1 and ledger.open("a", 5.1) == ()


def test_a_worker_that_is_gone_takes_its_assignments_along() -> None:
    ledger = Ledger()
    ledger.assign("a", 0.0)
    ledger.drop("a")
    ledger.drop("a")
    assert ledger.open("a", 0.0) == ()


def test_marks_expire() -> None:
    marks = Marks(for_s=1.0)
    marks.mark("a", 0.0)
    marks.mark("b", 0.5)
    assert marks.marked(0.9) == {"a", "b"}
    assert marks.marked(1.0) == {"b"}
    marks.clear("b")
    assert marks.marked(1.0) == frozenset()


def test_a_clock_that_runs_ahead_is_not_stale() -> None:
    assert not Staleness(2.0).stale(at=100.0, now=10.0)
    assert not Staleness(2.0).stale(at=8.0, now=10.0)
    assert Staleness(2.0).stale(at=7.9, now=10.0)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_bad_numbers(bad: float) -> None:
    with pytest.raises(ValueError, match="overload mark"):
        Marks(for_s=bad)
    if bad:
        with pytest.raises(ValueError, match="per_request"):
            DecodeCost(bad, 1.0)
    with pytest.raises(ValueError, match="zero"):
        DecodeCost(0.0, 0.0)
