"""Simulated engines: sizes that contradict one another, and keys that only real engines read."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_deepinfer.recipes.checks.context import Context
from vllm_deepinfer.recipes.schema import Simulated

_REAL_ONLY = ("kv_gib", "cpu_binds", "model_path")


def check_simulated(context: Context) -> Iterator[str]:
    """Also of the `simulated` part of a pool of vLLM engines."""
    config = context.facts.config
    vocab, eos = (129_280, 1) if config is None else (config.text_config.vocab_size, config.eos_token_id)
    for name, pool in context.recipe.pools.items():
        sizes = pool.simulated or Simulated()
        try:
            sizes.config("model", vocab_size=vocab, eos_token_id=eos)
        except ValueError as error:
            yield f"pools.{name}.simulated: {str(error).rstrip('.')}."
        if pool.engine != "simulated":
            continue
        for key in _REAL_ONLY:
            if getattr(pool, key):
                yield f"pools.{name}.{key} is not read by a simulated engine: leave it out."
