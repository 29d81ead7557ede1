"""A recipe for real hardware, run on simulated engines of its true sizes and numbers on one machine."""

from __future__ import annotations

from vllm_deepinfer.checkpoint.options import TinyOptions
from vllm_deepinfer.recipes.schema import Model, Placement, Pool, Ray, Recipe, Resources, Simulated

REPLICA_CPUS = 0.01
"""Ray's reservation per simulated replica: 128 of them fit on two cores."""


def rehearsal(recipe: Recipe) -> Recipe:
    """The same pools, replica counts, routing, scaling and gateway; engines simulated by `pool.simulated`.

    Real weights are replaced by a tiny checkpoint with the released tokenizer; nodes, GPUs and labels by this
    machine, so gangs and bounds per node are left out. A simulated engine keeps no KV: what would go through
    a store is handed over at once. Deadlines and health stay.
    """
    model, transfer = recipe.model, recipe.transfer
    if model.tiny is None:
        tiny = TinyOptions(tokenizer="released")
        model = Model(tiny=tiny, served_name=recipe.served_names[0], aliases=model.aliases)
    ray = Ray(namespace=recipe.ray.namespace, deadlines=recipe.ray.deadlines, health=recipe.ray.health)
    return recipe.model_copy(
        update={
            "model": model,
            "pools": {name: _simulated(pool) for name, pool in recipe.pools.items()},
            "store": None,
            "transfer": transfer.model_copy(update={"kind": "nixl"})
            if transfer.kind == "store"
            else transfer,
            "gateway": recipe.gateway.model_copy(update={"node_labels": {}}),
            "ray": ray,
        }
    )


def _simulated(pool: Pool) -> Pool:
    return pool.model_copy(
        update={
            "engine": "simulated",
            "resources": Resources(cpus=REPLICA_CPUS),
            "placement": Placement(),
            "model_path": None,
            "engine_args": {},
            "simulated": pool.simulated or Simulated(),
            "env": {},
            "cpu_binds": (),
            "kv_gib": None,
        }
    )
