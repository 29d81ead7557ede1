"""Recipe: one deployment as data. Keys of a YAML file map one to one to these fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vllm_deepinfer.recipes.base import Name, Part
from vllm_deepinfer.recipes.gateway import Gateway
from vllm_deepinfer.recipes.model import Dtype, Model
from vllm_deepinfer.recipes.placement import Placement, Replicas, Resources, Strategy
from vllm_deepinfer.recipes.pool import EngineName, Pool, Role
from vllm_deepinfer.recipes.ray import Deadlines, HealthChecks, Ray
from vllm_deepinfer.recipes.scaling import Autoscaling
from vllm_deepinfer.recipes.simulated import Simulated, SimulatedCost, SimulatedSpeculation
from vllm_deepinfer.recipes.transfer import Nixl, Store, Targets, Transfer

__all__ = [
    "Autoscaling",
    "Deadlines",
    "Dtype",
    "EngineName",
    "Gateway",
    "HealthChecks",
    "Model",
    "Nixl",
    "Placement",
    "Pool",
    "Ray",
    "Recipe",
    "Replicas",
    "Resources",
    "Role",
    "Simulated",
    "SimulatedCost",
    "SimulatedSpeculation",
    "Store",
    "Strategy",
    "Targets",
    "Transfer",
]


class Recipe(Part):
    """A deployment.

    Attributes:
        name: of the application. description: for people.
        model: what is served. pools: by name; the name is a metric label and part of actor names.
        transfer: of KV between pools. store: the shared prefix store; None: none.
        targets: latencies. gateway: the front door. ray: the cluster.
    """

    name: Name
    description: str = ""
    model: Model
    pools: Annotated[dict[Name, Pool], Field(min_length=1)]
    transfer: Transfer = Transfer()
    store: Store | None = None
    targets: Targets = Targets()
    gateway: Gateway = Gateway()
    ray: Ray = Ray()

    def with_role(self, *roles: Role) -> dict[str, Pool]:
        """The pools of these roles, in the file's order."""
        return {name: pool for name, pool in self.pools.items() if pool.role in roles}

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names that clients may use; the first is canonical."""
        path = self.model.path
        name = self.model.served_name or (path.rstrip("/").rsplit("/", 1)[-1] if path else self.name)
        return (name, *self.model.aliases)
