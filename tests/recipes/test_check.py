"""check_recipe: every recipe of ours is sound, contradictions give exactly their list, and nothing raises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.recipes.samples import ALONE, FOUR_CORES, GB200, H200, RECIPES, SIMULATED, SPLIT, changed, faults
from vllm_deepinfer.recipes import Recipe, load_recipe
from vllm_deepinfer.recipes.check import check_recipe
from vllm_deepinfer.recipes.cluster_view import ClusterView, NodeView
from vllm_deepinfer.recipes.load import build
from vllm_deepinfer.recipes.rehearsal import rehearsal
from vllm_deepinfer.recipes.yaml_lines import Document

TWO_CORES = NodeView("here", 2, memory_gib=16)
LABELLED = (
    NodeView("p", 1, memory_gib=4, labels={"pool": "prefill"}),
    NodeView("d", 1, memory_gib=4, labels={"pool": "decode"}),
)
MEANT_FOR = {
    "laptop": ClusterView((TWO_CORES,)),
    "laptop-simulated": ClusterView((TWO_CORES,)),
    "laptop-store": ClusterView((TWO_CORES,)),
    "cpu-cluster": ClusterView((TWO_CORES, *LABELLED)),
    "h200-8": H200,
    "h200-8-1p1d": H200,
    "gb200-64": GB200,
}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_our_recipes_are_sound_on_what_they_are_meant_for(path: Path) -> None:
    recipe = load_recipe(path)
    assert check_recipe(recipe, MEANT_FOR[recipe.name]) == []
    assert check_recipe(recipe) == []


def test_we_have_the_recipes_that_are_promised() -> None:
    assert {path.stem for path in RECIPES} == set(MEANT_FOR)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_rehearsed_on_two_cores(path: Path) -> None:
    recipe = rehearsal(load_recipe(path))
    assert check_recipe(recipe, ClusterView((TWO_CORES,))) == []
    assert {pool.engine for pool in recipe.pools.values()} == {"simulated"}


@pytest.mark.parametrize("base", [ALONE, SPLIT, SIMULATED])
def test_small_sound_recipes(base: dict[str, Any]) -> None:
    assert faults(base, cluster=FOUR_CORES) == []


def test_everything_wrong_is_told_at_once() -> None:
    found = faults(
        SPLIT,
        cluster=FOUR_CORES,
        model={"tiny": {}, "dtype": "float16"},
        pools__prefill={
            "role": "prefill",
            "replicas": {"min": 3, "max": 2},
            "kv_gib": 0.0001,
            "engine_args": {"max_model_len": 4096, "block_size": 32, "max_num_seq": 4},
        },
        pools__decode={
            "role": "decode",
            "resources": {"cpus": 8},
            "engine_args": {
                "max_model_len": 2048,
                "block_size": 64,
                "speculative_config": {"method": "dspark"},
            },
            "autoscaling": {"target_queue_s": 1},
        },
        transfer={"kind": "none"},
        gateway={"host": "0.0.0.0", "port": 8000, "metrics_port": 8000},
        store={"url": "nowhere:x"},
    )
    assert found == [
        "model.dtype is float16, but pools.prefill runs on CPUs, whose class computes in bfloat16 or "
        "float32: "
        "write one of these.",
        "model.dtype is float16, but pools.decode runs on CPUs, whose class computes in bfloat16 or float32: "
        "write one of these.",
        "transfer.kind is none, but prefill and decode are pools of their own: write kind: nixl, or kind: "
        "store with a store, so that KV gets from one to the other.",
        "pools.prefill.engine_args.max_num_seq is no argument of vLLM 0.32: did you mean max_num_seqs?",
        "pools.prefill.engine_args.block_size is 32, but pools.decode.engine_args.block_size is 64: write "
        "the "
        "same in both, because a block of one is not a block of the other.",
        "pools.prefill.engine_args.speculative_config is left out, but "
        "pools.decode.engine_args.speculative_config is {'method': 'dspark'}: write the same in both, "
        "because the "
        "drafter's KV is part of what is handed over.",
        "pools.decode.engine_args.max_model_len is 2048, below the 4096 of pools.prefill: prompts that were "
        "prefilled would find no place, write at least as much.",
        "pools.prefill.kv_gib is 0.0001, but one request of max_model_len 4096 needs 0.00074 GiB of KV: "
        "write "
        "more, or a smaller engine_args.max_model_len.",
        "pools.prefill.replicas.min is 3, above max 2: swap them.",
        "pools.decode.autoscaling has no effect on a fixed number of replicas: write replicas as "
        "{min, max}, or "
        "drop it.",
        "pools.decode.autoscaling.target_queue_s does not apply to the role decode: its targets are "
        "target_itl_ms, target_kv_use.",
        "pools.decode: no node can hold a bundle; the nearest, node, lacks CPU (needs 8, has 4).",
        "gateway.port (8000) and gateway.metrics_port (8000) both take port 8000 of a node: move one of "
        "them.",
        "gateway.host is 0.0.0.0, which other machines reach: give gateway.api_keys, or allow_anonymous: "
        "true.",
        "store.url is nowhere:x: write a folder such as /var/lib/kv, memory:NAME, or "
        "s3://BUCKET?endpoint=URL.",
    ]


# What a fuzzer writes into a recipe: values that pass the schema and contradict others, and ones that do not.
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 100_000)
    | st.floats(-1, 1e6, allow_nan=False)
    | st.sampled_from(["", "auto", "cpu", "cuda", "nixl", "x", "0", "0-3", "/x", "a/b", "PACK", "é\0"])
)
VALUES = (
    SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.sampled_from(["min", "max", "x"]), SCALARS)
)
KEYS = st.sampled_from(
    [
        *(
            "model.path",
            "model.tokenizer",
            "model.dtype",
            "model.served_name",
            "model.aliases",
            "model.tiny.layers",
        ),
        *(
            "model.tiny.ratios",
            "model.tiny.vocab",
            "model.tiny.experts",
            "model.tiny.overrides",
            "model.tiny.window",
        ),
        *(
            "pools.%.role",
            "pools.%.engine",
            "pools.%.replicas",
            "pools.%.replicas.initial",
            "pools.%.replicas.max",
        ),
        *("pools.%.resources.cpus", "pools.%.resources.gpus", "pools.%.resources.memory_gib"),
        *("pools.%.resources.custom", "pools.%.resources.node_labels", "pools.%.placement.bundles"),
        *("pools.%.placement.strategy", "pools.%.placement.gang", "pools.%.placement.max_replicas_per_node"),
        *("pools.%.model_path", "pools.%.engine_args", "pools.%.engine_args.block_size"),
        *("pools.%.engine_args.max_model_len", "pools.%.engine_args.tensor_parallel_size"),
        *("pools.%.engine_args.kv_cache_dtype", "pools.%.engine_args.additional_config"),
        *("pools.%.engine_args.additional_config.deepinfer", "pools.%.engine_args.gpu_memory_utilization"),
        *("pools.%.engine_args.max_num_seqs", "pools.%.engine_args.max_num_batched_tokens"),
        *(
            "pools.%.simulated.block_size",
            "pools.%.simulated.kv_capacity_tokens",
            "pools.%.env",
            "pools.%.kv_gib",
        ),
        *(
            "pools.%.cpu_binds",
            "pools.%.autoscaling",
            "transfer.kind",
            "transfer.nixl.side_channel_base_port",
        ),
        *("gateway.host", "gateway.port", "gateway.per_node", "gateway.api_keys", "gateway.response_db"),
        *("gateway.nodes", "ray.address", "ray.local_nodes", "ray.dashboard_port", "store.url"),
    ]
)
CHANGES = st.dictionaries(KEYS, VALUES, min_size=1, max_size=6)


def written(base: dict[str, Any], changes: dict[str, Any]) -> Recipe | None:
    """The recipe with the changes that can be written and that the schema takes."""
    value = base
    for key, new in changes.items():
        for pool in base["pools"]:
            try:
                attempt = changed(value, {key.replace("%", pool): new})
            except (TypeError, AttributeError, KeyError):
                continue
            if build(Document(attempt))[0] is not None:
                value = attempt
    return build(Document(value))[0]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([ALONE, SPLIT, SIMULATED]), CHANGES, st.sampled_from([None, FOUR_CORES, H200]))
def test_no_recipe_makes_check_raise(
    base: dict[str, Any], changes: dict[str, Any], cluster: ClusterView | None
) -> None:
    recipe = written(base, changes)
    assert recipe is not None
    found = check_recipe(recipe, cluster)
    assert all(fault and fault[-1] in ".?" and "\n" not in fault for fault in found)
    assert len(set(found)) == len(found)


@settings(max_examples=200, deadline=None)
@given(CHANGES)
def test_no_document_makes_loading_raise(changes: dict[str, Any]) -> None:
    value = SPLIT
    for key, new in changes.items():
        try:
            value = changed(value, {key.replace("%", "decode"): new})
        except (TypeError, AttributeError):
            continue
    recipe, found = build(Document(value))
    assert (recipe is None) == bool(found)
    assert all(fault[-1] in ".?" for fault in found)
    json.dumps(value)
