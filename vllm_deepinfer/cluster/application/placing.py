"""Waits until the application runs, and says which pool could not be placed, and for want of what."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
import ray._private.state as ray_state
from ray import serve

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.recipes.schema import Pool, Recipe

from .placement import bundle_of, grouped


class PlacementError(UserError):
    """A pool has no place in the cluster, or did not start."""


def await_running(
    name: str,
    recipe: Recipe,
    say: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
    poll_s: float = 0.2,
    rounds: int = 1,
) -> None:
    """Return when every deployment of the application is healthy.

    A replica that Ray has placed has an actor; one that waits for resources has none, and after
    `deadlines.place_s` the start fails with what is missing where.

    Args:
        rounds: of replicas that start one after the other, each within `deadlines.start_s`.
    Raises:
        PlacementError: One sentence.
        KeyboardInterrupt: ``stopped`` said so.
    """
    limits, began, said = recipe.ray.deadlines, time.monotonic(), ""
    placed_at: float | None = None
    while True:
        if stopped():
            raise KeyboardInterrupt
        application = serve.status().applications.get(name)
        states = {} if application is None else dict(application.deployments)
        line = ", ".join(f"{one} {_progress(state)}" for one, state in sorted(states.items()))
        if line and line != said:
            say(line)
            said = line
        if application is not None and application.status == "RUNNING":
            return
        if application is not None and application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise PlacementError(_failure(application, states))
        now = time.monotonic()
        unplaced = unplaced_pools(name, recipe)
        if unplaced and now - began > limits.place_s:
            pool = unplaced[0]
            raise PlacementError(why_unplaced(pool, recipe.pools[pool], limits.place_s))
        if not unplaced and placed_at is None:
            placed_at = now
        if placed_at is not None and now - placed_at > limits.start_s * rounds:
            raise PlacementError(
                f"the engines were not ready within {limits.start_s * rounds:g} s of their placement "
                f"({line}): raise ray.deadlines.start_s if the machine is slow or busy."
            )
        time.sleep(poll_s)


def unplaced_pools(name: str, recipe: Recipe) -> list[str]:
    """Pools with fewer placed groups than replicas at the start; replicas themselves where there are none."""
    groups = [one["name"] for one in ray.util.placement_group_table().values() if one["state"] == "CREATED"]
    actors = [one["Name"] for one in ray_state.actors().values() if one["State"] == "ALIVE"]
    found = []
    for pool, settings in recipe.pools.items():
        placed = sum(f"{name}#{pool}#" in one for one in (groups if grouped(settings) else actors))
        if placed < -(-settings.replicas.at_start // (settings.placement.gang or 1)):
            found.append(pool)
    return found


def why_unplaced(name: str, pool: Pool, waited_s: float, nodes: list[Mapping[str, Any]] | None = None) -> str:
    """Which resource is missing where, of what one replica's bundle needs."""
    need = bundle_of(pool.resources)
    alive = [node for node in (ray.nodes() if nodes is None else nodes) if node["Alive"]]
    free = _free_by_node() if nodes is None else {node["NodeID"]: node["Resources"] for node in alive}
    wanted = pool.resources.node_labels
    parts = []
    for node in alive:
        labels = node.get("Labels", {})
        unmet = [f"label {key}={value}" for key, value in wanted.items() if labels.get(key) != value]
        has = free.get(node["NodeID"], {})
        unmet += [
            f"{_amount(key, amount)} (free {_amount(key, has.get(key, 0.0), bare=True)})"
            for key, amount in need.items()
            if has.get(key, 0.0) < amount
        ]
        parts.append(
            f"node {node['NodeManagerAddress']} lacks {', '.join(unmet) or 'nothing for one replica more'}"
        )
    bundle = ", ".join(_amount(key, amount) for key, amount in need.items())
    return (
        f"pool {name} could not be placed within {waited_s:g} s: each of its {pool.replicas.at_start} "
        f"replicas needs {pool.placement.bundles} × {{{bundle}}}, and "
        f"{'; '.join(parts) or 'the cluster has no node'}; add nodes, or ask for less."
    )


def _free_by_node() -> Mapping[str, Mapping[str, float]]:
    from ray._private.state import available_resources_per_node

    found: Mapping[str, Mapping[str, float]] = available_resources_per_node()
    return found


def _amount(key: str, amount: float, *, bare: bool = False) -> str:
    text = f"{amount / (1 << 30):g} GiB" if key == "memory" else f"{amount:g}"
    return text if bare else f"{text} {key}"


def _progress(state: Any) -> str:
    counts = {str(getattr(key, "value", key)): count for key, count in state.replica_states.items()}
    return "+".join(f"{count} {key.lower()}" for key, count in counts.items() if count) or "waiting"


def _failure(application: Any, states: Mapping[str, Any]) -> str:
    messages = [
        f"{name}: {_last_line(state.message)}" for name, state in states.items() if state.status != "HEALTHY"
    ]
    return "the application did not start: " + ("; ".join(messages) or _last_line(application.message)) + "."


def _last_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return (lines[-1] if lines else "no reason was given").rstrip(".")
