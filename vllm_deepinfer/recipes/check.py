"""All that is wrong with a recipe, before anything starts."""

from __future__ import annotations

from vllm_deepinfer.recipes.checks.context import Check, Context
from vllm_deepinfer.recipes.checks.cores import check_cores
from vllm_deepinfer.recipes.checks.engine_args import check_engine_args
from vllm_deepinfer.recipes.checks.gateway import check_gateway
from vllm_deepinfer.recipes.checks.memory import check_memory
from vllm_deepinfer.recipes.checks.model import check_model
from vllm_deepinfer.recipes.checks.pairs import check_pairs
from vllm_deepinfer.recipes.checks.placement import check_placement
from vllm_deepinfer.recipes.checks.ports import check_ports
from vllm_deepinfer.recipes.checks.ray import check_ray, check_store
from vllm_deepinfer.recipes.checks.roles import check_roles, check_transfer
from vllm_deepinfer.recipes.checks.scaling import check_scaling
from vllm_deepinfer.recipes.checks.simulated import check_simulated
from vllm_deepinfer.recipes.cluster_view import ClusterView
from vllm_deepinfer.recipes.facts import model_facts
from vllm_deepinfer.recipes.schema import Recipe

CHECKS: tuple[Check, ...] = (
    check_model,
    check_roles,
    check_transfer,
    check_engine_args,
    check_simulated,
    check_pairs,
    check_memory,
    check_scaling,
    check_cores,
    check_placement,
    check_ports,
    check_gateway,
    check_ray,
    check_store,
)


def check_recipe(recipe: Recipe, cluster: ClusterView | None = None) -> list[str]:
    """Every fault as one sentence; an empty list: nothing is known to be wrong. Never raises.

    Args:
        recipe: with absolute paths, as `load_recipe` makes them.
        cluster: what it is to run on; None leaves out placement, cores and taken ports. A store is
            looked for on the network, for at most its own timeout.
    """
    context = Context(recipe, model_facts(recipe.model), cluster)
    found = [fault for check in CHECKS for fault in check(context)]
    return list(dict.fromkeys(found))
