from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.bench.routing.policies import (
    OTHERS,
    ConsistentHash,
    PowerOfTwo,
    RoundRobin,
    Uniform,
    others,
)

NAMES = [f"replica{number}" for number in range(8)]


def test_round_robin_takes_one_after_the_other_whatever_order_they_are_told_in() -> None:
    policy = RoundRobin()
    seen = [policy(0, Random(i).sample(NAMES, 8))[0] for i in range(16)]
    assert seen == NAMES * 2


def test_random_is_even() -> None:
    policy = Uniform(Random(1))
    counts = Counter(policy(0, NAMES)[0] for _ in range(8000))
    assert set(counts) == set(NAMES)
    assert all(count == pytest.approx(1000, rel=0.15) for count in counts.values())


def test_power_of_two_offers_two_different_ones_and_every_pair() -> None:
    policy = PowerOfTwo(Random(2))
    pairs = [tuple(policy(0, NAMES)) for _ in range(4000)]
    assert all(len(set(pair)) == 2 for pair in pairs)
    assert len({frozenset(pair) for pair in pairs}) == 8 * 7 // 2
    assert list(policy(0, ["only"])) == ["only"]


@given(st.integers(0, 2**32 - 1), st.permutations(NAMES))
def test_equal_prefixes_go_to_the_same_replica(prefix: int, order: list[str]) -> None:
    assert ConsistentHash()(prefix, order) == ConsistentHash()(prefix, NAMES)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50), st.sampled_from(NAMES))
def test_when_a_replica_goes_only_its_own_prefixes_move(prefixes: list[int], gone: str) -> None:
    policy = ConsistentHash()
    before = {prefix: policy(prefix, NAMES)[0] for prefix in prefixes}
    rest = [name for name in NAMES if name != gone]
    for prefix, owner in before.items():
        after = policy(prefix, rest)[0]
        assert after == owner if owner != gone else after in rest


def test_many_prefixes_are_spread_over_all_replicas() -> None:
    policy = ConsistentHash()
    counts = Counter(policy(Random(i).randrange(1 << 32), NAMES)[0] for i in range(8000))
    assert set(counts) == set(NAMES)
    assert max(counts.values()) < 1.6 * min(counts.values())


def test_all_of_them_by_name() -> None:
    made = others(Random(0))
    assert tuple(made) == OTHERS
    for policy in made.values():
        assert set(policy(5, NAMES)) <= set(NAMES)
