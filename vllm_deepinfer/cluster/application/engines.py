"""A replica's engine, made from its pool's part of the recipe."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from vllm_deepinfer.engine import Engine
from vllm_deepinfer.engine.simulated import SimulatedEngine, chained_tokens
from vllm_deepinfer.errors import UserError
from vllm_deepinfer.gateway.engines import make_engine, vocabulary
from vllm_deepinfer.recipes.checkpoints import ensure_checkpoint
from vllm_deepinfer.recipes.schema import Pool, Recipe, Simulated, Store

from .slots import claim_slot
from .specs import ReplicaSpec

HAND_OVER = "vllm_deepinfer.hand_over"
"""Entry points: role, lease and deadline → what vLLM's --kv-transfer-config takes."""
STORE_CONNECTOR = "vllm_deepinfer_plugins.kv_connector"
"""The module that vLLM loads in the engine's process; this process never imports it."""


def engine_of(spec: ReplicaSpec) -> Engine:
    """An engine that is not started. Sets this process's environment to the pool's.

    Raises: UserError.
    """
    recipe, pool = spec.whole, spec.settings
    folder = Path(pool.model_path) if pool.model_path else ensure_checkpoint(recipe)
    if pool.engine == "simulated":
        return _simulated(recipe, pool, folder)
    os.environ.update(_environment(spec))
    arguments = flags({**_transfer(recipe, pool), **pool.engine_args, **_own(recipe, pool)})
    return make_engine("vllm", folder, arguments, wedge_after_s=recipe.ray.health.wedge_after_s)


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """EngineArgs by name as the flags of `vllm serve`; a value of None leaves vLLM's default."""
    made: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            made.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, (dict, list)) and not (
            isinstance(value, list) and all(isinstance(one, (str, int)) for one in value)
        ):
            made += [flag, json.dumps(value)]
        elif isinstance(value, list):
            made += [flag, *map(str, value)]
        else:
            made += [flag, str(value)]
    return made


def _simulated(recipe: Recipe, pool: Pool, folder: Path) -> SimulatedEngine:
    words = vocabulary(folder)
    sizes = pool.simulated or Simulated()
    config = sizes.config(
        recipe.served_names[0], vocab_size=words["vocab_size"], eos_token_id=words["eos_token_id"]
    )
    # Chained: a request that goes on at another replica is given the rest of the same answer.
    return SimulatedEngine(config, tokens=chained_tokens(config.vocab_size))


def _own(recipe: Recipe, pool: Pool) -> dict[str, Any]:
    """What the application decides."""
    own: dict[str, Any] = {"dtype": recipe.model.dtype}
    if pool.kv_gib is not None and pool.resources.gpus:
        own["kv_cache_memory_bytes"] = int(pool.kv_gib * (1 << 30))
    return {**own, **_scheduler(recipe, pool)}


def _scheduler(recipe: Recipe, pool: Pool) -> dict[str, Any]:
    """Where prefill and decode share steps, the ITL target is kept by cutting prefill to a time budget."""
    target = recipe.targets.itl_ms
    if pool.role != "aggregated" or target is None or "scheduler_cls" in pool.engine_args:
        return {}
    config = dict(pool.engine_args.get("additional_config") or {})
    ours = {"itl_target_ms": target, "itl_percentile": recipe.targets.itl_percentile}
    config["deepinfer"] = {**ours, **config.get("deepinfer", {})}
    name = (
        "AsyncTimeBudgetScheduler" if pool.resources.gpus else "TimeBudgetScheduler"
    )  # as vLLM schedules there
    return {"scheduler_cls": f"vllm_deepinfer_plugins.scheduler.{name}", "additional_config": config}


def _transfer(recipe: Recipe, pool: Pool) -> dict[str, Any]:
    """vLLM's KV connector: the shared store, NIXL between prefill and decode, or both at once."""
    store, kind = recipe.store, recipe.transfer.kind
    if pool.role not in ("prefill", "decode"):
        return {} if store is None else {"kv_transfer_config": store_connector(store)}
    if kind == "store" and store is not None:
        wait_s = recipe.transfer.timeout_s
        return {"kv_transfer_config": store_connector(store, hand_over_wait_s=wait_s)}
    if kind != "nixl":
        return {}
    nixl = _nixl(recipe, pool)
    return {"kv_transfer_config": nixl if store is None else both_connectors(nixl, store_connector(store))}


def _nixl(recipe: Recipe, pool: Pool) -> dict[str, Any]:
    found = {point.name: point for point in entry_points(group=HAND_OVER)}
    if "nixl" not in found:
        raise UserError("transfer.kind nixl needs vllm-deepinfer-plugins on every node; install it.")
    nixl = recipe.transfer.nixl
    made: dict[str, Any] = found["nixl"].load()(
        pool.role,
        lease_s=nixl.lease_s,
        fetch_timeout_s=recipe.transfer.timeout_s,
        cpu=nixl.buffer_device == "cpu",
    )
    return made


def store_connector(store: Store, *, hand_over_wait_s: float | None = None) -> dict[str, Any]:
    """What `--kv-transfer-config` takes for the shared prefix store.

    Args:
        hand_over_wait_s: the store is how prompts reach the decode pool, which waits so long for them.
    """
    extra: dict[str, Any] = {"store": store.url}
    if store.capacity is not None:
        extra["capacity"] = store.capacity
    if store.run_tokens is not None:
        extra["run_tokens"] = store.run_tokens
    if store.classes is not None:
        extra["classes"] = [one.model_dump() for one in store.classes]
    if store.default_class != Store.model_fields["default_class"].default:
        extra["default_class"] = store.default_class
    if hand_over_wait_s is not None:
        extra |= {"hand_over": True, "hand_over_wait_s": hand_over_wait_s}
    return {
        "kv_connector": "PrefixStoreConnector",
        "kv_connector_module_path": STORE_CONNECTOR,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def both_connectors(nixl: Mapping[str, Any], store: Mapping[str, Any]) -> dict[str, Any]:
    """What `--kv-transfer-config` takes for NIXL and the store together; a hand-over comes before a hit."""
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": f"{STORE_CONNECTOR}.multi",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        **({"kv_buffer_device": nixl["kv_buffer_device"]} if "kv_buffer_device" in nixl else {}),
        "kv_connector_extra_config": {"connectors": [dict(nixl), dict(store)]},
    }


def _environment(spec: ReplicaSpec) -> dict[str, str]:
    pool, nixl = spec.settings, spec.whole.transfer.nixl
    environment = {"VLLM_NIXL_SIDE_CHANNEL_HOST": nixl.side_channel_host or spec.host(), **pool.env}
    if pool.kv_gib is not None and not pool.resources.gpus:
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(pool.kv_gib))
    if pool.cpu_binds or nixl.side_channel_base_port is not None:
        slot = claim_slot(f"{spec.session}-{spec.pool}")
        if pool.cpu_binds:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = pool.cpu_binds[slot % len(pool.cpu_binds)]
    if nixl.side_channel_base_port is not None:
        # One series for all that begins at this port on the node: prefill and decode of one application, or
        # of two, must not meet on a port (ray #60057).
        base = nixl.side_channel_base_port
        port = base + claim_slot(f"nixl-{base}")
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
    return environment
