"""Another recipe for an application that runs: what may change, and what each of its processes is told.

Serve replaces the replicas of a deployment whose options or arguments are others, a few at a time, and drains
each before it stops. So a process is told no more of the recipe than it uses: a change of one pool leaves the
other pool and the gateways alone.
"""

from __future__ import annotations

from typing import Any

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.recipes.gateway import Gateway
from vllm_deepinfer.recipes.placement import Replicas
from vllm_deepinfer.recipes.pool import Pool
from vllm_deepinfer.recipes.schema import Recipe

FIXED = ("name", "model", "transfer", "store", "gateway", "ray")
"""Old and new replicas work together for a while, behind gateways that stay."""


def for_pool(recipe: Recipe, name: str) -> Recipe:
    """What a replica of the pool is told: nothing of other pools, of the gateways, or of how many it is."""
    pool = recipe.pools[name].model_copy(update={"replicas": Replicas(), "autoscaling": None})
    return recipe.model_copy(update={"description": "", "pools": {name: pool}, "gateway": Gateway()})


def for_gateway(recipe: Recipe) -> Recipe:
    """What a gateway is told: which pools there are, and whether they may be empty."""
    pools = {
        name: Pool(role=pool.role, engine=pool.engine, replicas=Replicas(min=min(pool.replicas.min, 1)))
        for name, pool in recipe.pools.items()
    }
    return recipe.model_copy(update={"description": "", "pools": pools, "targets": type(recipe.targets)()})


def refuse_changes(old: Recipe, new: Recipe) -> None:
    """Raises: UserError naming what cannot change while the application runs."""
    changed: list[str] = [key for key in FIXED if getattr(old, key) != getattr(new, key)]
    if {name: pool.role for name, pool in old.pools.items()} != {
        name: pool.role for name, pool in new.pools.items()
    }:
        changed.append("pools' names and roles")
    if changed:
        raise UserError(
            f"{' and '.join(changed)} cannot change while the application runs: take the change back, or "
            "stop and start it."
        )


def changed_pools(old: Recipe, new: Recipe) -> dict[str, bool]:
    """Pools that change, and whether their replicas are replaced; else there are only more or fewer."""
    return {
        name: for_pool(old, name) != for_pool(new, name) or _placed(old.pools[name]) != _placed(pool)
        for name, pool in new.pools.items()
        if old.pools[name] != pool or for_pool(old, name) != for_pool(new, name)
    }


def _placed(pool: Pool) -> Any:
    return pool.resources, pool.placement
