"""The cluster's own settings, and the store."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.recipes.checks.context import Context
from vllm_deepinfer.recipes.store_url import unreachable
from vllm_deepinfer.store.uri import size

_ADDRESS = re.compile(r"(ray://)?[A-Za-z0-9._-]+:(\d{1,5})|(ray://)?\[[0-9a-fA-F:]+\]:(\d{1,5})")


def check_ray(context: Context) -> Iterator[str]:
    """Settings of a local cluster beside the address of another one; times that contradict one another."""
    ray = context.recipe.ray
    if ray.address not in ("local", "auto"):
        found = _ADDRESS.fullmatch(ray.address)
        if found is None or int(found[2] or found[4]) > 65535:
            yield f"ray.address is {ray.address}: write local, auto, or host:port of the cluster's head."
    if ray.address != "local":
        for key in ("num_cpus", "local_nodes", "dashboard_port"):
            if getattr(ray, key):
                yield (
                    f"ray.{key} is for a cluster of our own, but ray.address is {ray.address}: leave it out."
                )
    health = ray.health
    if health.wedge_after_s <= health.period_s:
        yield (
            f"ray.health.wedge_after_s is {health.wedge_after_s:g}, no longer than period_s "
            f"{health.period_s:g}: "
            "write a longer time than the longest step."
        )


def check_store(context: Context) -> Iterator[str]:
    """A store that is named must be there, and an engine must use it."""
    store = context.recipe.store
    if store is None:
        return
    for name, pool in context.recipe.with_role("aggregated", "prefill", "decode").items():
        if pool.engine == "simulated":
            yield f"store is given, but pools.{name} is simulated and keeps no KV: leave it out."
    if store.capacity is not None:
        try:
            size(store.capacity, "store.capacity")
        except UserError as error:
            yield str(error)
    try:
        store.retention  # noqa: B018
    except ValueError as error:
        yield f"store.classes: {error}"
    problem = unreachable(store.url, store.connect_timeout_s)
    if problem:
        yield f"store.url is {store.url}: {problem}."
