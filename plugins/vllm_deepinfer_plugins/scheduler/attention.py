"""How many keys a query of this model attends to at most: the bound of a step cost's attention terms."""

from __future__ import annotations

from typing import Any

from vllm_deepinfer.policy.step_cost import FULL_ATTENTION, AttentionBound, StepCost

from ..settings import Settings


def bound_of(hf_text_config: Any, kv_cache_specs: list[Any]) -> AttentionBound:
    """The bound of the layers that cost most at a long context: the largest window, where all have one.

    A model that selects positions (DeepSeek's index_topk) has none. It attends to a constant number, but to
    select them it scores every position for every query, which is what grows: on a small V4.1 on a CPU the
    terms of full attention had a median error of 3.9 % on held-out steps, those bounded by window and top-k
    5.7 % (one thread, 2026-11-30).
    """
    if getattr(hf_text_config, "index_topk", None):
        return FULL_ATTENTION
    windows = [getattr(spec, "sliding_window", None) for spec in kv_cache_specs]
    if windows and all(windows):
        return AttentionBound(window=max(w for w in windows if w))
    return FULL_ATTENTION


def empty_cost(settings: Settings, vllm_config: Any, kv_cache_config: Any) -> StepCost:
    """A step cost without coefficients yet; the attention's bound and the tile, which are known."""
    from vllm.platforms import current_platform

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    tile = settings.prefill_tile or (32 if current_platform.is_cpu() else 128)
    return StepCost(0.0, 0.0, attention=bound_of(vllm_config.model_config.hf_text_config, specs), tile=tile)
