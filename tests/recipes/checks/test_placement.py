"""Whether pools fit, and which resource is missing where."""

from __future__ import annotations

from typing import Any

import pytest

from tests.recipes.samples import ALONE, GB200, H200, RECIPES, SPLIT, cluster, faults
from vllm_deepinfer.recipes import load_recipe
from vllm_deepinfer.recipes.checks.context import Context
from vllm_deepinfer.recipes.checks.placement import check_placement
from vllm_deepinfer.recipes.cluster_view import ClusterView, NodeView
from vllm_deepinfer.recipes.facts import ModelFacts

TWO = cluster(NodeView("a", 4, memory_gib=8), NodeView("b", 2, memory_gib=8, labels={"pool": "b"}))


def told(where: ClusterView | None, base: dict[str, Any] = ALONE, **changes: Any) -> list[str]:
    return faults(base, check=check_placement, cluster=where, **changes)


def test_without_a_cluster_nothing_is_said() -> None:
    assert told(None, pools__all__replicas=1000) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"replicas": 6}, []),
        ({"resources": {"cpus": 4}}, []),
        ({"resources": {"node_labels": {"pool": "b"}, "cpus": 2}}, []),
        ({"resources": {"cpus": 0, "gpus": 0}, "replicas": 100}, []),
        (
            {"resources": {"cpus": 5}},
            ["pools.all: no node can hold a bundle; the nearest, a, lacks CPU (needs 5, has 4)."],
        ),
        (
            {"resources": {"cpus": 3, "gpus": 1, "memory_gib": 9, "custom": {"fast": 1}}},
            [
                "pools.all: no node can hold a bundle; the nearest, a, lacks GPU (needs 1, has 0); GiB of "
                "memory "
                "(needs 9, has 8); fast (needs 1, has 0)."
            ],
        ),
        (
            {"resources": {"node_labels": {"pool": "c", "zone": "1"}}},
            [
                "pools.all.resources.node_labels wants pool=c, zone=1, which none of the 2 nodes has: label "
                "some."
            ],
        ),
        (
            {"replicas": 7},
            [
                "pools.all needs 7 CPU at the start (7 bundles of 1), but its nodes have 6: write fewer "
                "replicas, or add nodes."
            ],
        ),
        (
            {"replicas": {"min": 1, "max": 99, "initial": 6}},
            [],  # what it may grow to is not placed at the start
        ),
        (
            {"replicas": 5, "placement": {"max_replicas_per_node": 2}},
            [
                "pools.all starts with 5 replicas, but at most 2 on each of 2 nodes: raise "
                "placement.max_replicas_per_node, or add nodes."
            ],
        ),
        (
            {"placement": {"bundles": 3, "strategy": "STRICT_SPREAD"}},
            [
                "pools.all.placement.strategy is STRICT_SPREAD over 3 bundles, but only 2 nodes can hold "
                "one: "
                "write SPREAD, or add nodes."
            ],
        ),
        (
            {"placement": {"bundles": 5, "strategy": "STRICT_PACK"}},
            [
                "pools.all.placement.strategy is STRICT_PACK, but no node can hold all 5 bundles of a "
                "replica: "
                "write PACK."
            ],
        ),
        ({"placement": {"bundles": 5, "strategy": "PACK"}}, []),
        (
            {"replicas": 2, "placement": {"bundles": 3, "strategy": "STRICT_PACK"}},
            [
                "pools.all starts with 2 replicas, but only 1 fit beside the pools before it (1 CPU per "
                "bundle): write fewer, or add nodes."
            ],
        ),
    ],
)
def test_one_pool(changes: dict[str, Any], expected: list[str]) -> None:
    assert told(TWO, **{f"pools__all__{key}": value for key, value in changes.items()}) == expected


def test_two_pools_that_fit_alone_and_not_together() -> None:
    found = told(TWO, SPLIT, pools__prefill__resources={"cpus": 4}, pools__decode__replicas=3)
    assert found == [
        "pools.decode starts with 3 replicas, but only 2 fit beside the pools before it (1 CPU per bundle): "
        "write fewer, or add nodes."
    ]


def test_every_hopeless_pool_is_told() -> None:
    found = told(TWO, SPLIT, pools__prefill__resources={"gpus": 1}, pools__decode__resources={"gpus": 2})
    assert [fault.split(":")[0] for fault in found] == ["pools.prefill", "pools.decode"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_our_recipes_fit_what_they_are_written_for(path: Any) -> None:
    recipe = load_recipe(path)
    where = {"gb200-64": GB200, "h200-8": H200, "h200-8-1p1d": H200}.get(
        recipe.name, ClusterView.of_this_machine(recipe.ray)
    )
    assert list(check_placement(Context(recipe, ModelFacts(), where))) == []


def test_gb200_does_not_fit_half_of_its_racks() -> None:
    recipe = load_recipe(next(path for path in RECIPES if path.stem == "gb200-64"))
    half = ClusterView(GB200.nodes[:24])  # 16 prefill trays, 8 decode trays
    assert list(check_placement(Context(recipe, ModelFacts(), half))) == [
        "pools.decode needs 64 GPU at the start (64 bundles of 1), but its nodes have 32: write fewer "
        "replicas, "
        "or add nodes."
    ]
