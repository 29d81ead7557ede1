"""Whether the pools fit on the cluster, and if not, which resource is missing where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vllm_deepinfer.recipes.checks.context import Context
from vllm_deepinfer.recipes.cluster_view import NodeView
from vllm_deepinfer.recipes.packing import Free, place
from vllm_deepinfer.recipes.schema import Pool


def check_placement(context: Context) -> Iterator[str]:
    """Each pool alone first, by what it lacks; then all together, by trying."""
    if context.cluster is None:
        return
    nodes = context.cluster.nodes
    pools = {name: pool for name, pool in context.recipe.pools.items() if pool.role != "encoder"}
    hopeless = False
    for name, pool in pools.items():
        for fault in _alone(name, pool, nodes):
            hopeless = True
            yield fault
    if hopeless:
        return
    free = [Free.of(node) for node in nodes]
    for name, pool in pools.items():
        placed = place(pool, pool.replicas.at_start, free)
        if placed < pool.replicas.at_start:
            yield (
                f"pools.{name} starts with {pool.replicas.at_start} replicas, but only {placed} fit beside "
                "the "
                f"pools before it ({_most_needed(pool)} per bundle): write fewer, or add nodes."
            )


def _alone(name: str, pool: Pool, nodes: tuple[NodeView, ...]) -> Iterator[str]:
    labels = pool.resources.node_labels
    eligible = tuple(node for node in nodes if _has_labels(node, labels))
    if not eligible:
        wanted = ", ".join(f"{key}={value}" for key, value in labels.items())
        yield (
            f"pools.{name}.resources.node_labels wants {wanted}, which none of the {len(nodes)} nodes has: "
            "label some."
        )
        return
    fitting = [node for node in eligible if not lacks(pool, node)]
    if not fitting:
        nearest = min(eligible, key=lambda node: len(lacks(pool, node)))
        lacking = "; ".join(lacks(pool, nearest))
        yield f"pools.{name}: no node can hold a bundle; the nearest, {nearest.name}, lacks {lacking}."
        return
    need, replicas = needs(pool), pool.replicas.at_start
    bundles = replicas * pool.placement.bundles
    for resource, amount in need.items():
        total = sum(offers(node).get(resource, 0.0) for node in fitting)
        if amount * bundles > total + 1e-9:
            yield (
                f"pools.{name} needs {amount * bundles:g} {resource} at the start ({bundles} bundles of "
                f"{amount:g}), "
                f"but its nodes have {total:g}: write fewer replicas, or add nodes."
            )
            return
    bound = pool.placement.max_replicas_per_node
    if bound is not None and replicas > bound * len(fitting):
        yield (
            f"pools.{name} starts with {replicas} replicas, but at most {bound} on each of {len(fitting)} "
            "nodes: raise placement.max_replicas_per_node, or add nodes."
        )
    if pool.placement.strategy == "STRICT_SPREAD" and pool.placement.bundles > len(fitting):
        yield (
            f"pools.{name}.placement.strategy is STRICT_SPREAD over {pool.placement.bundles} bundles, but "
            "only "
            f"{len(fitting)} nodes can hold one: write SPREAD, or add nodes."
        )
    if pool.placement.strategy == "STRICT_PACK" and not any(
        all(
            offers(node).get(key, 0.0) + 1e-9 >= amount * pool.placement.bundles
            for key, amount in need.items()
        )
        for node in fitting
    ):
        yield (
            f"pools.{name}.placement.strategy is STRICT_PACK, but no node can hold all "
            f"{pool.placement.bundles} bundles of a replica: write PACK."
        )


def needs(pool: Pool) -> dict[str, float]:
    """What one bundle takes, by the names of sentences."""
    own = pool.resources
    found = {"CPU": own.cpus, "GPU": own.gpus, "GiB of memory": own.memory_gib or 0.0, **own.custom}
    return {name: amount for name, amount in found.items() if amount > 0}


def offers(node: NodeView) -> dict[str, float]:
    """What a node has, by the same names; memory that is not known is no bound."""
    memory = float("inf") if node.memory_gib is None else node.memory_gib
    return {"CPU": node.cpus, "GPU": node.gpus, "GiB of memory": memory, **node.custom}


def lacks(pool: Pool, node: NodeView) -> list[str]:
    """Clauses about what one bundle misses on an otherwise empty node."""
    offered = offers(node)
    return [
        f"{name} (needs {amount:g}, has {offered.get(name, 0.0):g})"
        for name, amount in needs(pool).items()
        if offered.get(name, 0.0) + 1e-9 < amount
    ]


def _has_labels(node: NodeView, labels: Mapping[str, str]) -> bool:
    return all(node.labels.get(key) == value for key, value in labels.items())


def _most_needed(pool: Pool) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in needs(pool).items()) or "nothing"
