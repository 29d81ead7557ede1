"""KV and weights against memory; the sizes themselves are tested beside kv_size."""

from __future__ import annotations

from typing import Any

import pytest

from tests.recipes.samples import ALONE, GB200, H200, RECIPES, cluster, faults, recipe
from vllm_deepinfer.checkpoint.kv_size import KvForm
from vllm_deepinfer.recipes import load_recipe
from vllm_deepinfer.recipes.checks.context import Context
from vllm_deepinfer.recipes.checks.memory import check_memory, device_weights, kv_form
from vllm_deepinfer.recipes.cluster_view import NodeView
from vllm_deepinfer.recipes.facts import model_facts, released_config

RELEASED = {"model": {"path": "deepseek-ai/DeepSeek-V4.1-Flash"}}


def told(**changes: Any) -> list[str]:
    return faults(ALONE, check=check_memory, **changes)


def test_enough_memory_passes() -> None:
    assert told(pools__all__kv_gib=0.25, pools__all__resources={"memory_gib": 1}) == []
    assert told() == []


def test_kv_that_does_not_hold_one_request() -> None:
    # tiny: 3 sources of the ratios 2, 2, 1 with rows of (32 + 32) × 2 B make 192 B per token at most
    found = told(pools__all__kv_gib=0.0009)
    assert found == [
        "pools.all.kv_gib is 0.0009, but one request of max_model_len 8192 needs 0.0015 GiB of KV: write "
        "more, "
        "or a smaller engine_args.max_model_len."
    ]
    assert told(pools__all__kv_gib=0.0009, pools__all__engine_args={"max_model_len": 2048}) == []


def test_a_cpu_engine_needs_weights_and_kv_in_host_memory() -> None:
    assert told(pools__all__kv_gib=2, pools__all__resources={"memory_gib": 1}) == [
        "pools.all.resources.memory_gib is 1, but weights (0.004 GiB) and KV (2 GiB) take 2.0 GiB: write "
        "more."
    ]


def test_a_cpu_engine_larger_than_the_largest_node() -> None:
    nodes = cluster(NodeView("small", 4, memory_gib=8), NodeView("large", 4, memory_gib=64))
    found = told(**RELEASED, cluster=nodes, pools__all__kv_gib=4)
    assert found == [
        "pools.all needs 478.3 GiB for weights and KV, but the largest node has 64.0 GiB: choose a smaller "
        "model or kv_gib, or larger nodes."
    ]


@pytest.mark.parametrize(
    ("gpus", "gang", "expert", "expected"),
    [
        (8, None, False, (275.7 + 9.8) / 8),
        (4, None, False, (275.7 + 9.8) / 4),
        (1, 64, True, 275.7 / 64 + 9.8),
        (1, 64, False, 275.7 + 9.8),  # without expert parallelism each rank holds all experts
        (2, 4, True, 275.7 / 8 + 9.8 / 2),
    ],
)
def test_weights_per_gpu(gpus: int, gang: int | None, expert: bool, expected: float) -> None:
    pool = recipe(
        ALONE,
        pools__all__engine_args={"tensor_parallel_size": gpus, "enable_expert_parallel": expert},
        pools__all__placement={"gang": gang},
    ).pools["all"]
    weights = model_facts(recipe(ALONE, **RELEASED).model).weights
    assert weights is not None
    assert device_weights(pool, weights) / 2**30 == pytest.approx(expected, abs=0.05)


def test_a_model_that_no_gpu_holds() -> None:
    found = told(
        **RELEASED,
        cluster=H200,
        pools__all__resources={"gpus": 2},
        pools__all__engine_args__tensor_parallel_size=2,
    )
    assert found == [
        "pools.all needs 143.6 GiB on each GPU (weights 142.8, KV 0.87), but 92% of 131 GiB is 120.5: use "
        "more GPUs per replica, or enable_expert_parallel with a larger placement.gang."
    ]


def test_engram_tables_need_host_memory() -> None:
    node = cluster(NodeView("small", 64, 8, 128, 131))
    changes = {"pools__all__resources": {"gpus": 8}, "pools__all__engine_args": {"tensor_parallel_size": 8}}
    assert told(**RELEASED, cluster=node, **changes) == [
        "pools.all keeps 188.8 GiB of Engram tables in host memory, but the largest node has 128.0 GiB: "
        "choose "
        "larger nodes."
    ]


@pytest.mark.parametrize("name", ["h200-8", "h200-8-1p1d", "gb200-64"])
def test_recipes_for_real_hardware_fit_it(name: str) -> None:
    path = next(path for path in RECIPES if path.stem == name)
    found = load_recipe(path)
    where = GB200 if name == "gb200-64" else H200
    assert list(check_memory(Context(found, model_facts(found.model), where))) == []


def test_the_smallest_form_is_assumed() -> None:
    assert kv_form(recipe(ALONE).pools["all"]) is KvForm.PORTABLE
    assert kv_form(recipe(ALONE, pools__all__resources={"gpus": 1}).pools["all"]) is KvForm.PACKED
    assert released_config().text_config.max_position_embeddings == 1_048_576
