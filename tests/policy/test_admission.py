"""Admission: the three modes, the doorkeeper's memory, and what is learned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.policy.admission import Admission, Doorkeeper, Mode, ReuseEstimate, Rule


def name(i: int) -> bytes:
    return i.to_bytes(8, "big")


def test_always_stores_and_short_prompts_never() -> None:
    admission = Admission(Rule(min_tokens=1_000))
    assert admission.admit(name(1), 1, False, 1_000)
    assert not admission.admit(name(2), 1, True, 999)


def test_second_sighting() -> None:
    admission = Admission(Rule(Mode.SECOND_SIGHTING))
    assert [admission.admit(name(i), 1, False, 10) for i in (1, 2, 1, 1, 3)] == [
        False,
        False,
        True,
        True,
        False,
    ]


@given(st.lists(st.integers(0, 30), max_size=200), st.integers(1, 20))
def test_a_doorkeeper_never_invents_and_remembers_the_last_generation(ids: list[int], capacity: int) -> None:
    door, shown = Doorkeeper(capacity), list[int]()
    for i in ids:
        known = door.seen(name(i))
        assert not known or i in shown
        recent: set[int] = set()
        for earlier in reversed(shown):  # the last `capacity` different ids are always remembered
            if len(recent) == capacity:
                break
            recent.add(earlier)
        assert known or i not in recent or len(recent) == capacity
        shown.append(i)


def test_a_doorkeeper_forgets_by_generations() -> None:
    door = Doorkeeper(2)
    assert [door.seen(name(i)) for i in (1, 2, 3, 1)] == [False, False, False, True]
    assert door.seen(name(2)) is False, "1, 2 went when 3, 1 filled the generation after them"


def test_expected_reuse_stores_at_once_until_it_has_learned_that_nothing_comes_back() -> None:
    admission = Admission(Rule(Mode.EXPECTED_REUSE, min_reuse=0.2))
    stored = [admission.admit(name(i), 0, False, 10) for i in range(100)]
    assert stored[0] is True and stored[-1] is False
    assert stored.count(True) == 30, "prior 0.5 × 20 of (first + 20) falls below 0.2 at the 31st"
    assert admission.admit(name(200), 0, True, 10), "another kind has its own count"
    assert admission.admit(name(200), 1, False, 10), "its second sighting is stored anyhow"
    assert admission.admit(name(99), 0, False, 10)


def test_expected_reuse_learns_from_runs_that_come_back() -> None:
    admission = Admission(Rule(Mode.EXPECTED_REUSE, min_reuse=0.5))
    for i in range(200):
        admission.admit(name(i), 1, True, 10)
        admission.asked(name(i))
        admission.asked(name(i))
    assert admission.estimate.probability(1, True) == pytest.approx(210 / 220)


@given(st.lists(st.booleans(), max_size=300))
def test_probability_is_one_and_moves_with_what_is_seen(again: list[bool]) -> None:
    estimate = ReuseEstimate(horizon=50)
    for wanted in again:
        before = estimate.probability(1, False)
        estimate.first(1, False)
        assert estimate.probability(1, False) <= max(before, 0.5) + 0.2
        if wanted:
            low = estimate.probability(1, False)
            estimate.again(1, False)
            assert estimate.probability(1, False) >= low
        assert 0 <= estimate.probability(1, False) <= 1


@pytest.mark.parametrize("wrong", [{"min_tokens": -1}, {"min_reuse": 1.5}, {"min_reuse": float("nan")}])
def test_rules_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Rule(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one id"):
        Doorkeeper(0)
