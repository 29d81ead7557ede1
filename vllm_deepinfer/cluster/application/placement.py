"""From a pool's part of the recipe to the options of its Serve deployment."""

from __future__ import annotations

from typing import Any

from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingPolicy,
    GangSchedulingConfig,
    RequestRouterConfig,
)

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.recipes.schema import Pool, Recipe, Resources

from .specs import most_active

ROUTER = "vllm_deepinfer.cluster.application.request_router:PolicyRouter"
SCALING = "vllm_deepinfer.cluster.application.scaling:PoolScaling"
HEAD = "node:__internal_head__"


def pool_options(name: str, pool: Pool, recipe: Recipe, *, router: str = ROUTER) -> dict[str, Any]:
    """Options of `serve.deployment` for a pool."""
    health, deadlines = recipe.ray.health, recipe.ray.deadlines
    options: dict[str, Any] = {
        "name": name,
        "max_ongoing_requests": most_active(pool),
        "max_queued_requests": recipe.gateway.max_waiting,
        "health_check_period_s": health.period_s,
        "health_check_timeout_s": health.timeout_s,
        "graceful_shutdown_timeout_s": max(deadlines.drain_s, 1.0),
        "graceful_shutdown_wait_loop_s": 0.2,
        "max_constructor_retry_count": 3,
        "logging_config": {"enable_access_log": False},  # the gateway has a line for each request
        "request_router_config": RequestRouterConfig(
            request_router_class=router,
            request_router_kwargs={"pool": name, "role": pool.role},
            initial_backoff_s=0.01,
            backoff_multiplier=1.5,
            max_backoff_s=0.1,
        ),
        **_placed(pool),
    }
    if pool.replicas.scales:
        options["autoscaling_config"] = scaling_options(name, pool)
    else:
        options["num_replicas"] = pool.replicas.min
    return options


def scaling_options(name: str, pool: Pool) -> AutoscalingConfig:
    """Serve's own autoscaler, with our policy."""
    from vllm_deepinfer.recipes.schema import Autoscaling

    wanted = pool.autoscaling or Autoscaling()
    return AutoscalingConfig(
        min_replicas=pool.replicas.min,
        max_replicas=pool.replicas.max,
        initial_replicas=pool.replicas.at_start,
        metrics_interval_s=min(wanted.interval_s, 1.0),
        look_back_period_s=wanted.look_back_s,
        # The policy has its own delays, which know how far the target is missed.
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        policy=AutoscalingPolicy(
            policy_function=SCALING,
            policy_kwargs={"pool": name, "role": pool.role, **wanted.model_dump(mode="json")},
        ),
    )


def gateway_options(recipe: Recipe, nodes: int) -> dict[str, Any]:
    """Options of the gateways' deployment; ``nodes`` is how many nodes there are now."""
    door, health = recipe.gateway, recipe.ray.health
    everywhere = door.nodes == "every"
    actor: dict[str, Any] = {"num_cpus": 0}
    if door.node_labels:
        actor["label_selector"] = dict(door.node_labels)
    elif not everywhere:
        actor["resources"] = {HEAD: 0.001}
    return {
        "name": "gateway",
        "num_replicas": door.per_node * (nodes if everywhere else 1),
        "max_replicas_per_node": door.per_node,
        "ray_actor_options": actor,
        "max_ongoing_requests": 16,
        "health_check_period_s": health.period_s,
        "health_check_timeout_s": health.timeout_s,
        "graceful_shutdown_timeout_s": door.drain_timeout_s + 10.0,
        "graceful_shutdown_wait_loop_s": 0.2,
        "max_constructor_retry_count": 3,
    }


def bundle_of(resources: Resources) -> dict[str, float]:
    """Ray's names."""
    bundle = {"CPU": resources.cpus, "GPU": resources.gpus, **resources.custom}
    if resources.memory_gib is not None:
        bundle["memory"] = resources.memory_gib * (1 << 30)
    return {name: amount for name, amount in bundle.items() if amount}


def grouped(pool: Pool) -> bool:
    """Whether the pool's replicas have placement groups. Serve bounds replicas per node only without them."""
    return pool.placement.max_replicas_per_node is None or pool.placement.gang is not None


def _placed(pool: Pool) -> dict[str, Any]:
    placement, bundle, labels = pool.placement, bundle_of(pool.resources), dict(pool.resources.node_labels)
    actor: dict[str, Any] = {"num_cpus": pool.resources.cpus}
    if pool.resources.gpus:
        actor["num_gpus"] = pool.resources.gpus
    rest = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
    if rest:
        actor["resources"] = rest
    if "memory" in bundle:
        actor["memory"] = bundle["memory"]
    if not grouped(pool):
        if placement.bundles > 1:
            raise UserError(
                f"placement.max_replicas_per_node is for replicas of one bundle, and these have "
                f"{placement.bundles}; leave it out, and ask for a resource that a node has once."
            )
        if labels:
            actor["label_selector"] = labels
        return {"ray_actor_options": actor, "max_replicas_per_node": placement.max_replicas_per_node}
    options: dict[str, Any] = {
        "ray_actor_options": actor,
        "placement_group_bundles": [bundle or {"CPU": 0.001}] * placement.bundles,
    }
    if labels:
        options["placement_group_bundle_label_selector"] = [labels] * placement.bundles
    if placement.gang is not None:
        options["gang_scheduling_config"] = GangSchedulingConfig(
            gang_size=placement.gang,
            gang_placement_strategy="SPREAD" if placement.strategy.endswith("SPREAD") else "PACK",
        )
    else:
        options["placement_group_strategy"] = placement.strategy
    return options
