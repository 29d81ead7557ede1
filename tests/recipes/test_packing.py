"""Placing replicas, against an oracle that tries every assignment."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.recipes.samples import ALONE, recipe
from vllm_deepinfer.recipes.cluster_view import NodeView
from vllm_deepinfer.recipes.packing import Free, place
from vllm_deepinfer.recipes.schema import Pool


def pool(**changes: Any) -> Pool:
    return recipe(ALONE, **{f"pools__all__{key}": value for key, value in changes.items()}).pools["all"]


def nodes(*cpus: float, **rest: Any) -> list[Free]:
    return [Free.of(NodeView(str(n), count, **rest)) for n, count in enumerate(cpus)]


@pytest.mark.parametrize(
    ("placement", "count", "cpus", "placed", "left"),
    [
        ({}, 3, (2, 2), 3, [0, 1]),
        ({}, 5, (2, 2), 4, [0, 0]),
        ({"max_replicas_per_node": 1}, 3, (2, 2), 2, [1, 1]),
        ({"bundles": 3}, 1, (2, 2), 1, [0, 1]),  # PACK overflows to the next node
        ({"bundles": 3, "strategy": "STRICT_PACK"}, 1, (2, 2), 0, [2, 2]),
        ({"bundles": 2, "strategy": "STRICT_PACK"}, 3, (3, 2), 2, [1, 0]),
        ({"bundles": 2, "strategy": "SPREAD"}, 1, (2, 2), 1, [1, 1]),
        ({"bundles": 3, "strategy": "SPREAD"}, 1, (2, 2), 1, [0, 1]),
        ({"bundles": 2, "strategy": "STRICT_SPREAD"}, 2, (2, 2), 2, [0, 0]),
        ({"bundles": 3, "strategy": "STRICT_SPREAD"}, 1, (2, 2), 0, [2, 2]),
        ({"gang": 2}, 4, (3,), 2, [0]),  # the third fits, but half a gang is none
    ],
)
def test_strategies(
    placement: dict[str, Any], count: int, cpus: tuple[int, ...], placed: int, left: list[int]
) -> None:
    free = nodes(*cpus)
    assert place(pool(placement=placement), count, free) == placed
    assert [one.left["CPU"] for one in free] == left


def test_labels_choose_nodes() -> None:
    free = [Free.of(NodeView("a", 4)), Free.of(NodeView("b", 4, labels={"pool": "x"}))]
    assert place(pool(resources={"node_labels": {"pool": "x"}}), 9, free) == 4
    assert [one.left["CPU"] for one in free] == [4, 0]


def test_every_resource_counts() -> None:
    free = nodes(8, gpus=4, memory_gib=10, custom={"fast": 3})
    assert place(pool(resources={"cpus": 1, "memory_gib": 4}), 9, free) == 2
    assert place(pool(resources={"cpus": 1, "custom": {"fast": 1}}), 9, free) == 3
    assert place(pool(resources={"cpus": 1, "gpus": 2}), 9, free) == 2
    assert free[0].left == {"CPU": 1, "GPU": 0, "memory": 2, "fast": 0}


def test_fractions_add_up() -> None:
    assert place(pool(resources={"cpus": 0.1}), 99, nodes(1)) == 10


def most(cpus: list[int], need: int, bundles: int, count: int) -> int:
    """Most replicas of `bundles` bundles that any assignment of bundles to nodes reaches, each whole."""
    best = 0
    for replicas in range(1, count + 1):
        spots = replicas * bundles
        for chosen in product(range(len(cpus)), repeat=spots):
            if all(chosen.count(n) * need <= have for n, have in enumerate(cpus)):
                best = replicas
                break
    return best


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 3),
)
def test_bundles_of_one_size_are_packed_as_well_as_possible(
    cpus: list[int], need: int, bundles: int, count: int
) -> None:
    free = nodes(*cpus)
    found = place(pool(resources={"cpus": need}, placement={"bundles": bundles}), count, free)
    assert found == most(cpus, need, bundles, count)
    assert all(one.left["CPU"] >= 0 for one in free)
