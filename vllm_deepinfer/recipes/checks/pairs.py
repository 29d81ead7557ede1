"""Prefill and decode engines must make and read the same KV."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_deepinfer.checkpoint.fingerprint import fingerprint
from vllm_deepinfer.errors import UserError
from vllm_deepinfer.recipes.checks.context import Context, argument, workers
from vllm_deepinfer.recipes.facts import facts_at
from vllm_deepinfer.recipes.schema import Pool
from vllm_deepinfer.recipes.sentences import short

SHARED: dict[str, str] = {
    "block_size": "a block of one is not a block of the other",
    "kv_cache_dtype": "the bytes of a row differ",
    "speculative_config": "the drafter's KV is part of what is handed over",
    "spec_method": "the drafter's KV is part of what is handed over",
    "spec_model": "the drafter's KV is part of what is handed over",
    "spec_tokens": "the drafter's KV is part of what is handed over",
    "attention_backend": "it decides how KV is laid out",
    "disable_hybrid_kv_cache_manager": "it decides how KV is laid out",
    "swa_bounded_replay": "it decides whether window KV is handed over",
    "quantization": "the same tokens would have other KV",
    "load_format": "the same tokens would have other KV",
    "hf_overrides": "the same tokens would have other KV",
    "revision": "the same tokens would have other KV",
    "model_impl": "the same tokens would have other KV",
}
"""Engine arguments that both pools must give the same value, and why."""

SETTINGS = {
    "portable_model": "the two classes lay KV out differently",
    "encoder_replay": "it decides whether window KV is handed over",
}
"""The same for keys of additional_config.deepinfer."""


def check_pairs(context: Context) -> Iterator[str]:
    """Every fault between the two pools of a split deployment."""
    prefill = context.recipe.with_role("prefill")
    decode = context.recipe.with_role("decode")
    if len(prefill) != 1 or len(decode) != 1:
        return
    (p_name, p), (d_name, d) = *prefill.items(), *decode.items()
    if p.engine != d.engine:
        return
    if p.engine == "simulated":
        yield from _simulated(p_name, p, d_name, d)
        return
    for key, why in SHARED.items():
        ours, theirs = p.engine_args.get(key), d.engine_args.get(key)
        if ours != theirs:
            yield _differ(f"engine_args.{key}", p_name, ours, d_name, theirs, why)
    for key, why in SETTINGS.items():
        ours, theirs = _setting(p, key), _setting(d, key)
        if ours != theirs:
            yield _differ(f"engine_args.additional_config.deepinfer.{key}", p_name, ours, d_name, theirs, why)
    yield from _lengths(p_name, p, d_name, d, "engine_args", 0, 0)
    ranks = sorted((workers(p), workers(d)))
    if ranks[1] % ranks[0]:
        yield (
            f"pools.{p_name} has {workers(p)} workers per replica and pools.{d_name} {workers(d)}: NIXL "
            "splits KV over ranks only when one number divides the other."
        )
    if (p.resources.gpus == 0) != (d.resources.gpus == 0):
        cpu, gpu = (p_name, d_name) if p.resources.gpus == 0 else (d_name, p_name)
        yield (
            f"pools.{cpu} runs on CPUs and pools.{gpu} on GPUs: their engines lay KV out differently, give "
            "both "
            "the same kind of device."
        )
    yield from _models(context, {p_name: p, d_name: d})


def _setting(pool: Pool, key: str) -> Any:
    config = pool.engine_args.get("additional_config")
    ours = config.get("deepinfer") if isinstance(config, dict) else None
    return ours.get(key) if isinstance(ours, dict) else None


def _differ(key: str, p_name: str, ours: Any, d_name: str, theirs: Any, why: str) -> str:
    return (
        f"pools.{p_name}.{key} is {_said(ours)}, but pools.{d_name}.{key} is {_said(theirs)}: write the same "
        f"in both, because {why}."
    )


def _said(value: Any) -> str:
    return "left out" if value is None else short(value)


def _lengths(p_name: str, p: Pool, d_name: str, d: Pool, part: str, ours: int, theirs: int) -> Iterator[str]:
    if part == "engine_args":
        ours, theirs = argument(p, "max_model_len", 0), argument(d, "max_model_len", 0)
    if ours and theirs and theirs < ours:
        yield (
            f"pools.{d_name}.{part}.max_model_len is {theirs}, below the {ours} of pools.{p_name}: prompts "
            "that were prefilled would find no place, write at least as much."
        )


def _simulated(p_name: str, p: Pool, d_name: str, d: Pool) -> Iterator[str]:
    ours, theirs = p.simulated, d.simulated
    blocks = [32 if part is None else part.block_size for part in (ours, theirs)]
    if blocks[0] != blocks[1]:
        why = SHARED["block_size"]
        yield _differ("simulated.block_size", p_name, blocks[0], d_name, blocks[1], why)
    lengths = [32_768 if part is None else part.max_model_len for part in (ours, theirs)]
    yield from _lengths(p_name, p, d_name, d, "simulated", *lengths)


def _models(context: Context, pools: dict[str, Pool]) -> Iterator[str]:
    """Each pool's own copy must be the recipe's model; NIXL's handshake even compares the paths."""
    base = context.facts
    own = {name: pool.model_path for name, pool in pools.items() if pool.model_path is not None}
    if context.recipe.transfer.kind == "nixl" and len({pool.model_path for pool in pools.values()}) > 1:
        yield (
            "pools name different model_path: vLLM's NIXL handshake compares the paths, so keep the copies "
            "under one path on all nodes and write it in model.path."
        )
    for name, path in own.items():
        facts = facts_at(path, f"pools.{name}.model_path")
        if facts.fault:
            yield facts.fault
        elif facts.folder is not None and base.folder is not None:
            try:
                same = fingerprint(facts.folder) == fingerprint(base.folder)
            except UserError as error:
                yield f"pools.{name}.model_path: {error}."
                continue
            if not same:
                yield (
                    f"pools.{name}.model_path is {path}, which holds another model than model.path (config, "
                    "tokenizer or weights differ): name a copy of the same checkpoint."
                )
        elif context.recipe.model.tiny is not None:
            yield f"pools.{name}.model_path is given, but the recipe writes its own tiny model: leave it out."
