"""How many keys a query of this model attends to at most: the bound of a step cost's attention terms."""

from __future__ import annotations

from typing import Any

from vllm_deepinfer.policy.step_cost import FULL_ATTENTION, AttentionBound


def bound_of(hf_text_config: Any, kv_cache_specs: list[Any]) -> AttentionBound:
    """The bound of the layers that cost most at a long context.

    A model with one full-attention layer is bounded by nothing. One that selects positions (DeepSeek's
    index_topk) attends to those and to its window. One of sliding windows alone attends to the largest.
    """
    window = getattr(hf_text_config, "sliding_window", None)
    if top_k := getattr(hf_text_config, "index_topk", None):
        return AttentionBound(window=window or None, top_k=top_k)
    windows = [getattr(spec, "sliding_window", None) for spec in kv_cache_specs]
    if windows and all(windows):
        return AttentionBound(window=max(w for w in windows if w))
    return FULL_ATTENTION
