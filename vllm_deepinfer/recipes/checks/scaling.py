"""Replica counts, gangs and autoscaling targets."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_deepinfer.recipes.checks.context import Context
from vllm_deepinfer.recipes.schema import Pool

_TARGETS = {
    "prefill": {"target_queue_s"},
    "decode": {"target_kv_use", "target_itl_ms"},
    "aggregated": {"target_queue_s", "target_kv_use", "target_itl_ms"},
    "encoder": set(),
}


def check_scaling(context: Context) -> Iterator[str]:
    """What could never happen, and what would have no effect."""
    for name, pool in context.recipe.pools.items():
        yield from _check_counts(name, pool)
        yield from _check_gang(name, pool)
        yield from _check_targets(name, pool)


def _check_counts(name: str, pool: Pool) -> Iterator[str]:
    counts = pool.replicas
    if counts.min > counts.max:
        yield f"pools.{name}.replicas.min is {counts.min}, above max {counts.max}: swap them."
    elif not counts.min <= counts.at_start <= counts.max:
        yield (
            f"pools.{name}.replicas.initial is {counts.at_start}: write a number from {counts.min} to "
            f"{counts.max}, the bounds min and max."
        )


def _check_gang(name: str, pool: Pool) -> Iterator[str]:
    gang = pool.placement.gang
    if gang is None:
        return
    for key, count in (
        ("min", pool.replicas.min),
        ("max", pool.replicas.max),
        ("initial", pool.replicas.at_start),
    ):
        if count % gang:
            yield (
                f"pools.{name}.replicas ({key}) is {count}, no multiple of placement.gang {gang}: write one."
            )
            break
    if pool.placement.max_replicas_per_node is not None:
        yield (
            f"pools.{name}.placement has gang and max_replicas_per_node, which Ray Serve does not combine: "
            "leave one out."
        )
    if pool.placement.strategy.startswith("STRICT"):
        yield (
            f"pools.{name}.placement.strategy is {pool.placement.strategy}, but Ray Serve places a gang by "
            "PACK or SPREAD: write one of these."
        )


def _check_targets(name: str, pool: Pool) -> Iterator[str]:
    scaling = pool.autoscaling
    if pool.replicas.min == 0 and (scaling is None or scaling.scale_to_zero_after_s is None):
        yield (
            f"pools.{name}.replicas.min is 0, but nothing says when to stop the last replica: write "
            "autoscaling.scale_to_zero_after_s, or min: 1."
        )
    if scaling is None:
        return
    where = f"pools.{name}.autoscaling"
    if not pool.replicas.scales:
        yield (
            f"{where} has no effect on a fixed number of replicas: write replicas as {{min, max}}, or drop "
            "it."
        )
    if scaling.scale_to_zero_after_s is not None and pool.replicas.min > 0:
        yield (
            f"{where}.scale_to_zero_after_s has no effect with replicas.min {pool.replicas.min}: write "
            "min: 0."
        )
    for key in ("target_queue_s", "target_kv_use", "target_itl_ms"):
        if getattr(scaling, key) is not None and key not in _TARGETS[pool.role]:
            legal = ", ".join(sorted(_TARGETS[pool.role])) or "none"
            yield f"{where}.{key} does not apply to the role {pool.role}: its targets are {legal}."
