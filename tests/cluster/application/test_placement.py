"""Pools as options of Serve's deployments: every shipped recipe, and what each part of one becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray import serve
from ray.serve.config import RequestRouterConfig

from vllm_deepinfer.cluster.application.gateway_replica import GatewayReplica
from vllm_deepinfer.cluster.application.placement import (
    HEAD,
    bundle_of,
    gateway_options,
    grouped,
    pool_options,
    scaling_options,
)
from vllm_deepinfer.cluster.application.replica import EngineReplica
from vllm_deepinfer.cluster.application.request_router import PolicyRouter
from vllm_deepinfer.cluster.application.scaling import PoolScaling
from vllm_deepinfer.errors import UserError
from vllm_deepinfer.recipes import load_recipe
from vllm_deepinfer.recipes.rehearsal import rehearsal
from vllm_deepinfer.recipes.schema import Pool, Recipe, Resources

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))


class Other(PolicyRouter):
    """Of a benchmark."""


def recipe(pool: dict[str, Any] | None = None, **more: Any) -> Recipe:
    pools = {"main": {"role": "aggregated", **(pool or {})}}
    return Recipe.model_validate({"name": "app", "model": {"tiny": {}}, "pools": pools, **more})


def options(pool: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = recipe(pool, **more)
    return pool_options("main", found.pools["main"], found)


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
@pytest.mark.parametrize("rehearsed", [False, True])
def test_serve_takes_every_shipped_recipe(file: Path, rehearsed: bool) -> None:
    found = rehearsal(load_recipe(file)) if rehearsed else load_recipe(file)
    for name, pool in found.pools.items():
        deployment = serve.deployment(EngineReplica, **pool_options(name, pool, found))
        assert deployment.name == name
        made = pool_options(name, pool, found)
        assert made["ray_actor_options"].get("num_gpus", 0) == pool.resources.gpus
        if grouped(pool):
            assert len(made["placement_group_bundles"]) == pool.placement.bundles
    assert serve.deployment(GatewayReplica, **gateway_options(found, 2)).name == "gateway"


def test_bundles_have_ray_s_names_and_nothing_empty() -> None:
    resources = Resources(cpus=2.0, gpus=1.0, memory_gib=4.0, custom={"prefill": 1.0})
    assert bundle_of(resources) == {"CPU": 2.0, "GPU": 1.0, "memory": 4 << 30, "prefill": 1.0}
    assert bundle_of(Resources(cpus=0.0)) == {}


def test_the_replica_s_own_actor_fits_into_its_first_bundle() -> None:
    """An actor that asks for more than the bundle would wait for ever (Ray issue 59064)."""
    made = options({"resources": {"cpus": 2.0, "gpus": 1.0, "memory_gib": 4.0, "custom": {"x": 1.0}}})
    actor, bundle = made["ray_actor_options"], made["placement_group_bundles"][0]
    asked = {"CPU": actor["num_cpus"], "GPU": actor["num_gpus"], "memory": actor["memory"]}
    for name, amount in {**asked, **actor["resources"]}.items():
        assert amount <= bundle[name]


def test_labels_choose_nodes_for_every_bundle() -> None:
    made = options({"resources": {"node_labels": {"pool": "decode"}}, "placement": {"bundles": 3}})
    assert made["placement_group_bundle_label_selector"] == [{"pool": "decode"}] * 3
    assert "placement_group_bundle_label_selector" not in options({})


def test_a_bound_per_node_does_without_groups_as_serve_wants_it() -> None:
    made = options({"resources": {"node_labels": {"a": "b"}}, "placement": {"max_replicas_per_node": 2}})
    assert made["max_replicas_per_node"] == 2 and "placement_group_bundles" not in made
    assert made["ray_actor_options"]["label_selector"] == {"a": "b"}
    with pytest.raises(UserError, match="for replicas of one bundle, and these have 2"):
        options({"placement": {"max_replicas_per_node": 2, "bundles": 2}})


def test_a_gang_lives_and_dies_together() -> None:
    gang = options({"replicas": 4, "placement": {"gang": 4, "strategy": "SPREAD"}})
    assert gang["gang_scheduling_config"].gang_size == 4 and "max_replicas_per_node" not in gang
    assert gang["gang_scheduling_config"].gang_placement_strategy == "SPREAD"
    assert "placement_group_strategy" not in gang, "Serve refuses it beside a gang's"


def test_routing_is_ours_and_a_benchmark_s_when_it_says_so() -> None:
    made = options({"role": "decode"}, transfer={"kind": "nixl"})["request_router_config"]
    assert isinstance(made, RequestRouterConfig) and made.get_request_router_class() is PolicyRouter
    assert made.request_router_kwargs == {"pool": "main", "role": "decode"}
    found = recipe()
    other = pool_options(
        "main", found.pools["main"], found, router="tests.cluster.application.test_placement:Other"
    )
    assert other["request_router_config"].get_request_router_class().__name__ == "Other"


def test_limits_and_deadlines_are_the_recipe_s() -> None:
    ray = {"health": {"period_s": 3.0, "timeout_s": 7.0}, "deadlines": {"drain_s": 0.0}}
    made = options({"max_ongoing": 9}, ray=ray, gateway={"max_waiting": 77})
    assert made["max_ongoing_requests"] == 9 and made["max_queued_requests"] == 77
    assert (made["health_check_period_s"], made["health_check_timeout_s"]) == (3.0, 7.0)
    assert made["graceful_shutdown_timeout_s"] == 1.0


def test_a_fixed_pool_has_a_number_and_one_that_scales_a_policy() -> None:
    assert options({"replicas": 3})["num_replicas"] == 3
    made = options({"replicas": {"min": 0, "max": 4}, "autoscaling": {"scale_to_zero_after_s": 60.0}})
    assert "num_replicas" not in made
    config = made["autoscaling_config"]
    assert (config.min_replicas, config.max_replicas, config.initial_replicas) == (0, 4, 1)
    assert config.policy.policy_kwargs["scale_to_zero_after_s"] == 60.0


def test_the_scaling_policy_is_made_with_what_serve_is_given() -> None:
    pool = Pool.model_validate(
        {"role": "decode", "replicas": {"min": 1, "max": 3}, "autoscaling": {"target_kv_use": 0.5}}
    )
    kwargs = scaling_options("main", pool).policy.policy_kwargs
    assert PoolScaling(**kwargs).settings(1, 3).target_kv_use == 0.5


@pytest.mark.parametrize(("nodes", "where", "count"), [(3, "every", 6), (3, "head", 2)])
def test_gateways_stand_on_the_head_or_on_every_node(nodes: int, where: str, count: int) -> None:
    made = gateway_options(recipe(gateway={"nodes": where, "per_node": 2}), nodes)
    assert made["num_replicas"] == count and made["max_replicas_per_node"] == 2
    assert (HEAD in made["ray_actor_options"].get("resources", {})) == (where == "head")


def test_serve_writes_no_line_per_call_because_the_gateway_has_one_per_request() -> None:
    assert options({})["logging_config"] == {"enable_access_log": False}
