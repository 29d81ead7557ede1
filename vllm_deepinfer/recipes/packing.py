"""Places replicas on nodes as Ray's placement groups would: first fit, by strategy.

Not a scheduler: it answers whether a recipe fits, before anything starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm_deepinfer.recipes.cluster_view import NodeView
from vllm_deepinfer.recipes.schema import Pool

_SLACK = 1e-9


@dataclass
class Free:
    """What is left of a node."""

    node: NodeView
    left: dict[str, float]
    replicas: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, node: NodeView) -> Free:
        """An empty node."""
        memory = float("inf") if node.memory_gib is None else node.memory_gib
        return cls(node, {"CPU": node.cpus, "GPU": node.gpus, "memory": memory, **node.custom})

    def fits(self, need: Mapping[str, float], times: int = 1) -> bool:
        """Whether so many bundles still fit."""
        return all(self.left.get(name, 0.0) + _SLACK >= amount * times for name, amount in need.items())

    def take(self, need: Mapping[str, float], times: int = 1) -> None:
        """Reserve them; a negative number gives them back."""
        for name, amount in need.items():
            self.left[name] = self.left.get(name, 0.0) - amount * times


def place(pool: Pool, count: int, free: Sequence[Free]) -> int:
    """Reserve up to `count` replicas; returns how many fit. Whole gangs only, where the pool has gangs."""
    own, gang = pool.resources, pool.placement.gang or 1
    need = {"CPU": own.cpus, "GPU": own.gpus, "memory": own.memory_gib or 0.0, **own.custom}
    need = {name: amount for name, amount in need.items() if amount > 0}
    nodes = [
        one
        for one in free
        if all(one.node.labels.get(key) == value for key, value in own.node_labels.items())
    ]
    here: dict[int, int] = {}
    placed = 0
    for _ in range(count):
        bound = pool.placement.max_replicas_per_node
        open_nodes = [one for one in nodes if bound is None or here.get(id(one), 0) < bound]
        spots = _spots(pool, need, open_nodes)
        if spots is None:
            break
        for one in spots:
            one.take(need)
        first = id(spots[0])
        here[first] = here.get(first, 0) + 1
        placed += 1
    return placed // gang * gang


def _spots(pool: Pool, need: Mapping[str, float], nodes: Sequence[Free]) -> list[Free] | None:
    """A node for each bundle of one replica, or None."""
    bundles, strategy = pool.placement.bundles, pool.placement.strategy
    if strategy == "STRICT_PACK" or bundles == 1:
        found = next((one for one in nodes if one.fits(need, bundles)), None)
        return None if found is None else [found] * bundles
    spots: list[Free] = []
    taken: dict[int, int] = {}
    spread = strategy in ("SPREAD", "STRICT_SPREAD")
    for _ in range(bundles):
        order = sorted(nodes, key=lambda one: taken.get(id(one), 0)) if spread else nodes
        found = next((one for one in order if one.fits(need, taken.get(id(one), 0) + 1)), None)
        if found is None or (strategy == "STRICT_SPREAD" and taken.get(id(found), 0)):
            return None
        taken[id(found)] = taken.get(id(found), 0) + 1
        spots.append(found)
    return spots
