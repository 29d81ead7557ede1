"""Ports: ranges that leave the possible ones, that overlap, or that somebody else listens on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_deepinfer.recipes.checks.context import Context
from vllm_deepinfer.recipes.sockets import holder


@dataclass(frozen=True)
class Ports:
    """A recipe's key and the ports that follow from it on one node."""

    key: str
    ports: range


def check_ports(context: Context) -> Iterator[str]:
    """Ranges against 65535, against one another, and against what listens on this machine."""
    wanted = list(ranges(context))
    for one in wanted:
        if one.ports and one.ports[-1] > 65535:
            yield (
                f"{one.key} is {one.ports[0]}, and {_count(one)} ports from there pass 65535: write a "
                "smaller one."
            )
    for position, one in enumerate(wanted):
        for other in wanted[position + 1 :]:
            shared = range(max(one.ports[0], other.ports[0]), min(one.ports[-1], other.ports[-1]) + 1)
            if shared:
                yield (
                    f"{one.key} ({_said(one)}) and {other.key} ({_said(other)}) both take port {shared[0]} "
                    "of a "
                    "node: move one of them."
                )
    if context.cluster is None or not any(node.local for node in context.cluster.nodes):
        return
    for one in wanted:
        for port in one.ports:
            who = holder(port) if port <= 65535 else None
            if who is not None:
                yield f"{one.key} needs port {port}, which {who} listens on: stop it, or write another port."
                break


def ranges(context: Context) -> Iterator[Ports]:
    """Every fixed port range of the recipe; never empty."""
    recipe = context.recipe
    gateway = recipe.gateway
    if gateway.port:
        yield Ports("gateway.port", range(gateway.port, gateway.port + gateway.per_node))
    if gateway.metrics_port is not None:
        yield Ports("gateway.metrics_port", range(gateway.metrics_port, gateway.metrics_port + 1))
    if recipe.ray.dashboard_port is not None and recipe.ray.address == "local":
        port = recipe.ray.dashboard_port
        yield Ports("ray.dashboard_port", range(port, port + 1))
    base = recipe.transfer.nixl.side_channel_base_port
    count = side_channels(context)
    if base is not None and recipe.transfer.kind == "nixl" and count:
        yield Ports("transfer.nixl.side_channel_base_port", range(base, base + count))


def side_channels(context: Context) -> int:
    """Most replicas of vLLM engines on one node; each listens on a side channel of its own."""
    total = 0
    for pool in context.recipe.with_role("prefill", "decode").values():
        if pool.engine == "vllm":
            bound = pool.placement.max_replicas_per_node or _fit(
                context, pool.resources.gpus, pool.resources.cpus
            )
            total += min(pool.replicas.max, bound)
    return total


def _fit(context: Context, gpus: float, cpus: float) -> int:
    """How many bundles the largest node can hold by its CPUs and GPUs."""
    if context.cluster is None:
        return 1 << 30
    most = 0
    for node in context.cluster.nodes:
        by = [have / need for have, need in ((node.gpus, gpus), (node.cpus, cpus)) if need > 0]
        most = max(most, int(min(by, default=1 << 30)))
    return most


def _count(one: Ports) -> int:
    return len(one.ports)


def _said(one: Ports) -> str:
    return str(one.ports[0]) if len(one.ports) == 1 else f"{one.ports[0]} to {one.ports[-1]}"
