"""Cores of CPU engines, and the environment of replicas."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from vllm_deepinfer.recipes.checks.context import Context, on_cpu

BIND = "VLLM_CPU_OMP_THREADS_BIND"
_OWNED = {
    BIND: "cpu_binds",
    "VLLM_CPU_KVCACHE_SPACE": "kv_gib",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "transfer.nixl.side_channel_base_port",
}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BIND = re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*")


def cores_of(bind: str) -> frozenset[int] | None:
    """The cores of a bind such as "0-3,8"; None for one that is written otherwise ("auto", "nobind")."""
    if not _BIND.fullmatch(bind):
        return None
    cores: set[int] = set()
    for part in bind.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def check_cores(context: Context) -> Iterator[str]:
    """Binds that name no cores, cores that two replicas of one machine would share or that it lacks."""
    taken: dict[int, str] = {}
    for name, pool in context.recipe.pools.items():
        for key in pool.env:
            if not _NAME.fullmatch(key):
                yield f"pools.{name}.env has {key!r}: a variable's name has letters, digits and underscores."
            elif key in _OWNED:
                yield f"pools.{name}.env.{key} is set by the application: write {_OWNED[key]} instead."
        if pool.cpu_binds and pool.engine == "vllm" and not on_cpu(pool):
            yield f"pools.{name}.cpu_binds is for engines on CPUs, and this pool has GPUs: leave it out."
            continue
        for slot, bind in enumerate(pool.cpu_binds):
            cores = cores_of(bind)
            if not cores:
                yield f'pools.{name}.cpu_binds[{slot}] is "{bind}": write cores such as "0-3" or "0,2".'
                continue
            yield from _check_here(context, f"pools.{name}.cpu_binds[{slot}]", cores, taken)
    yield from _check_enough_binds(context)


def _check_here(context: Context, where: str, cores: frozenset[int], taken: dict[int, str]) -> Iterator[str]:
    """Where all nodes are one machine, all binds are of the same cores."""
    if context.cluster is None or not context.cluster.local:
        return
    shared = sorted(core for core in cores if core in taken)
    if shared:
        yield (
            f"{where} has core {shared[0]}, which {taken[shared[0]]} has too: give each replica its own "
            "cores."
        )
    available = available_cores()
    missing = sorted(core for core in cores if core not in available)
    if missing:
        yield (
            f"{where} has core {missing[0]}, which this machine does not give this process: "
            f"{_list(available)}."
        )
    taken.update(dict.fromkeys(cores, where))


def _list(cores: frozenset[int]) -> str:
    listed = sorted(cores)
    names = ", ".join(map(str, listed[:8])) + (", …" if len(listed) > 8 else "")
    return f"its cores are {names}"


def available_cores() -> frozenset[int]:
    """Cores that this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def _check_enough_binds(context: Context) -> Iterator[str]:
    for name, pool in context.recipe.pools.items():
        per_node = min(pool.replicas.max, pool.placement.max_replicas_per_node or pool.replicas.max)
        single = context.cluster is not None and context.cluster.local
        if pool.cpu_binds and on_cpu(pool) and single and len(pool.cpu_binds) < per_node:
            yield (
                f"pools.{name}.cpu_binds has {len(pool.cpu_binds)} entries for up to {per_node} replicas "
                "on one "
                "machine: write one for each."
            )
