"""What a recipe can be placed on: nodes with their resources, from Ray, from this machine, or described."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_deepinfer.recipes.schema import Ray, Resources

GIB = 1 << 30


@dataclass(frozen=True)
class NodeView:
    """One node.

    Attributes:
        name: for sentences. cpus, gpus, memory_gib: what Ray may give away.
        gpu_memory_gib: of each GPU; None: unknown, and then GPU memory is not checked.
        custom, labels: Ray's custom resources and node labels.
        local: this machine, whose ports and cores can be looked at.
    """

    name: str
    cpus: float
    gpus: float = 0.0
    memory_gib: float | None = None
    gpu_memory_gib: float | None = None
    custom: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    local: bool = False


@dataclass(frozen=True)
class ClusterView:
    """The nodes, in a fixed order."""

    nodes: tuple[NodeView, ...]

    @property
    def local(self) -> bool:
        """Whether every node is a process on this machine."""
        return all(node.local for node in self.nodes)

    @classmethod
    def of_this_machine(cls, ray: Ray) -> ClusterView:
        """The cluster that `ray.address: local` starts."""
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
        cpus = ray.num_cpus if ray.num_cpus is not None else os.cpu_count() or 1
        head = NodeView("the local node", cpus, memory_gib=memory, local=True)
        further = (_described(f"local node {n}", node, memory) for n, node in enumerate(ray.local_nodes, 2))
        return cls((head, *further))

    @classmethod
    def of_ray(cls, nodes: Iterable[Mapping[str, Any]]) -> ClusterView:
        """From the list that `ray.nodes()` returns; dead nodes are left out."""
        return cls(tuple(_of_ray(node) for node in nodes if node.get("Alive")))


def _described(name: str, node: Resources, memory: float) -> NodeView:
    return NodeView(
        name,
        node.cpus,
        node.gpus,
        min(node.memory_gib or memory, memory),
        custom=node.custom,
        labels=node.node_labels,
        local=True,
    )


_OWN = {"CPU", "GPU", "memory", "object_store_memory"}


def _of_ray(node: Mapping[str, Any]) -> NodeView:
    resources: Mapping[str, float] = node.get("Resources") or {}
    memory = resources.get("memory")
    custom = {
        name: amount
        for name, amount in resources.items()
        if name not in _OWN and not name.startswith(("node:", "accelerator_type:"))
    }
    return NodeView(
        name=str(node.get("NodeManagerHostname") or node.get("NodeManagerAddress") or "a node"),
        cpus=resources.get("CPU", 0.0),
        gpus=resources.get("GPU", 0.0),
        memory_gib=None if memory is None else memory / GIB,
        custom=custom,
        labels=dict(node.get("Labels") or {}),
    )
