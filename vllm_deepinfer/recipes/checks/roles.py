"""Which pools there are, and the transfer and store between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from vllm_deepinfer.recipes.checks.context import Context


def check_roles(context: Context) -> Iterator[str]:
    """Prefill with decode, or one aggregated pool, of one kind of engine."""
    pools = context.recipe.pools
    for name, pool in pools.items():
        if pool.role == "encoder":
            yield f"pools.{name}.role is encoder, which is reserved for a later version: leave the pool out."
    counts = Counter(pool.role for pool in pools.values())
    for role, count in counts.items():
        if count > 1:
            names = ", ".join(context.recipe.with_role(role))
            yield f"pools has {count} pools of the role {role} ({names}): write one, with more replicas."
    if counts["prefill"] and not counts["decode"]:
        yield "pools has a prefill pool and no decode pool: add one of the role decode."
    if counts["decode"] and not counts["prefill"]:
        yield "pools has a decode pool and no prefill pool: add one, or write the role aggregated."
    if counts["aggregated"] and (counts["prefill"] or counts["decode"]):
        yield "pools has an aggregated pool beside prefill and decode: write either form."
    engines = {pool.engine for pool in pools.values() if pool.role != "encoder"}
    if len(engines) > 1:
        yield "pools mixes engine: vllm and engine: simulated, which share no KV: write one of them."


def check_transfer(context: Context) -> Iterator[str]:
    """A way for the KV wherever there are two pools, and none where there is one."""
    recipe = context.recipe
    transfer, split = recipe.transfer, recipe.with_role("prefill", "decode")
    if transfer.kind == "none" and len(split) > 1:
        yield (
            "transfer.kind is none, but prefill and decode are pools of their own: write kind: nixl, or "
            "kind: store with a store, so that KV gets from one to the other."
        )
    if transfer.kind != "none" and not split and recipe.with_role("aggregated"):
        yield (
            f"transfer.kind is {transfer.kind}, but an aggregated pool hands nothing over: leave transfer "
            "out."
        )
    if transfer.kind == "store" and split and recipe.store is None:
        yield "transfer.kind is store, but there is none: write store.url, a folder that all engines share."
    if transfer.kind == "nixl" and transfer.nixl.buffer_device == "cuda":
        for name, pool in split.items():
            if pool.engine == "vllm" and pool.resources.gpus == 0:
                yield (
                    f"transfer.nixl.buffer_device is cuda, but pools.{name} has no GPU: write "
                    "buffer_device: cpu."
                )
    if "VLLM_NIXL_SIDE_CHANNEL_HOST" in {key for pool in split.values() for key in pool.env}:
        yield (
            "env sets VLLM_NIXL_SIDE_CHANNEL_HOST: write transfer.nixl.side_channel_host instead, for all "
            "pools."
        )
