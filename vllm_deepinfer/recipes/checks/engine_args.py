"""Engine arguments against vLLM 0.32's names and types; the contract test compares the list with vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from vllm_deepinfer.recipes.checks.context import Context, argument, workers
from vllm_deepinfer.recipes.schema import Pool
from vllm_deepinfer.recipes.sentences import nearest, short

OWNED = {
    "model": "model.path",
    "served_model_name": "model.served_name",
    "tokenizer": "model.tokenizer",
    "dtype": "model.dtype",
    "kv_transfer_config": "transfer",
    "kv_cache_memory_bytes": "kv_gib",
    "data_parallel_size": "placement.gang",
    "data_parallel_size_local": "placement.gang",
    "data_parallel_rank": "placement.gang",
    "data_parallel_start_rank": "placement.gang",
    "data_parallel_address": "placement.gang",
    "data_parallel_rpc_port": "placement.gang",
    "data_parallel_backend": "placement.gang",
    "data_parallel_external_lb": "placement.gang",
    "data_parallel_hybrid_lb": "placement.gang",
}
"""What the application sets itself, and the recipe's key for it."""

DEEPINFER = (
    *("portable_model", "batch_invariant", "native_kernels", "itl_target_ms", "itl_percentile"),
    *("step_budget_ms", "prefill_order", "prefill_tile", "step_cost_file"),
    *("encoder_replay", "decoder_replay", "window_tier_mib", "window_tier_ttl_s"),
    *("verification", "calibration_file"),
)
"""Keys of additional_config.deepinfer; the contract test compares them with the plugin's Settings."""

_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "list": (list,),
    "dict": (dict,),
}
_WRITE = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "dict": "keys and values",
}


@cache
def known() -> dict[str, str | list[Any]]:
    """Argument name → its kinds in one string ("int null"), or the list of its values."""
    file = files("vllm_deepinfer.recipes") / "data" / "vllm-0.32-engine-args.json"
    table: dict[str, str | list[Any]] = json.loads(file.read_text(encoding="utf-8"))
    return table


def check_engine_args(context: Context) -> Iterator[str]:
    """Names, types, and what one engine cannot be given together."""
    for name, pool in context.recipe.pools.items():
        where = f"pools.{name}.engine_args"
        if pool.engine == "simulated":
            if pool.engine_args:
                yield (
                    f"{where} is not read by a simulated engine: write its sizes under "
                    f"pools.{name}.simulated."
                )
            continue
        for key, value in pool.engine_args.items():
            yield from _check_one(where, name, key, value)
        yield from _check_additional(where, pool.engine_args.get("additional_config"))
        yield from _check_sizes(context, where, pool)
        yield from _check_parallel(name, pool)


def _check_one(where: str, pool: str, key: str, value: Any) -> Iterator[str]:
    if key not in known():
        dashed = key.replace("-", "_").lstrip("_")
        if dashed in known():
            yield f"{where}.{key} is a flag: write its name in Python, {dashed}."
        else:
            yield f"{where}.{key} is no argument of vLLM 0.32{nearest(key, list(known()))}"
    elif key in OWNED:
        place = OWNED[key]
        ours = f"pools.{pool}.{place}" if place in ("kv_gib", "placement.gang") else place
        yield f"{where}.{key} is set by the application: write {ours} instead."
    else:
        expected = known()[key]
        if isinstance(expected, list):
            if value is not None and value not in expected:
                near = get_close_matches(str(value), map(str, expected), n=1)
                listed = ", ".join(map(str, expected))
                yield f"{where}.{key} is {short(value)}: write {near[0] if near else f'one of {listed}'}."
        elif not _fits(value, expected.split()):
            kinds = " or ".join(_WRITE[kind] for kind in expected.split() if kind in _WRITE)
            yield f"{where}.{key} is {short(value)}: write {kinds}."


def _fits(value: Any, kinds: list[str]) -> bool:
    if value is None:
        return "null" in kinds
    if isinstance(value, bool):
        return "bool" in kinds
    return any(isinstance(value, _KINDS[kind]) for kind in kinds if kind in _KINDS)


def _check_additional(where: str, config: Any) -> Iterator[str]:
    if not isinstance(config, dict):
        return
    for key in config:
        if key in DEEPINFER:
            yield f"{where}.additional_config.{key} stands outside deepinfer: write it under deepinfer."
    ours = config.get("deepinfer", {})
    if not isinstance(ours, dict):
        yield f"{where}.additional_config.deepinfer is {short(ours)}: write keys and values."
        return
    for key in ours:
        if key not in DEEPINFER:
            yield f"{where}.additional_config.deepinfer.{key} is unknown{nearest(str(key), DEEPINFER)}"


def _check_sizes(context: Context, where: str, pool: Pool) -> Iterator[str]:
    arguments = pool.engine_args
    if "max_num_seqs" in arguments and "max_num_batched_tokens" in arguments:
        seqs, tokens = argument(pool, "max_num_seqs", 1), argument(pool, "max_num_batched_tokens", 1 << 62)
        if seqs > tokens:
            yield (
                f"{where}.max_num_batched_tokens is {tokens}, below max_num_seqs {seqs}: some decodes could "
                "never run, write a larger one."
            )
    for key in ("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        value = arguments.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            yield f"{where}.{key} is {value}: write 1 or more."
    if context.facts.config is None:
        return
    text = context.facts.config.text_config
    length = argument(pool, "max_model_len", 1)
    if length > text.max_position_embeddings:
        yield (
            f"{where}.max_model_len is {length}, but the model has {text.max_position_embeddings} positions: "
            "write at most that."
        )
    ratios = {plan.ratio for plan in text.schedule() if plan.owns_kv}
    block = argument(pool, "block_size", 0) if "block_size" in arguments else 0
    for ratio in sorted(ratios):
        if block % ratio:
            yield (
                f"{where}.block_size is {block}, which the model's ratio {ratio} does not divide: write a "
                "multiple."
            )


def _check_parallel(name: str, pool: Pool) -> Iterator[str]:
    gpus, ranks = pool.resources.gpus * pool.placement.bundles, workers(pool)
    if pool.resources.gpus == 0:
        if ranks > 1:
            yield (
                f"pools.{name} has no GPU and {ranks} workers per replica: on a CPU write "
                "tensor_parallel_size 1 and pipeline_parallel_size 1, and more replicas."
            )
        if pool.placement.gang:
            yield (
                f"pools.{name}.placement.gang is {pool.placement.gang}, but vLLM 0.32 runs "
                "mixture-of-experts "
                "data parallelism on GPUs only: leave it out, replicas are independent without it."
            )
    elif gpus != ranks:
        yield (
            f"pools.{name} gives a replica {gpus:g} GPUs ({pool.placement.bundles} × "
            f"{pool.resources.gpus:g}), "
            f"but its engine has {ranks} workers: make resources.gpus × placement.bundles equal to "
            "tensor_parallel_size × pipeline_parallel_size."
        )
