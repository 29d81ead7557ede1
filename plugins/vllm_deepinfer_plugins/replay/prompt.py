"""From which row on a prompt goes behind the last KV source: one answer for scheduler and worker."""

from __future__ import annotations

from typing import Any

from vllm_deepinfer.policy.replay import decoder_start

LEFT_TO_DECODER = 1
"""Prompt tokens that vLLM's NIXL connector takes off a prompt on the prefill side under bounded replay."""


def start_behind(prompt: int, rows: int | None, params: Any) -> int:
    """The first position of a prompt that goes behind the last KV source.

    A prefill engine that hands its KV over computes one token less than the prompt has; where its rows begin
    still follows from the whole prompt, or the two engines would answer otherwise than one.

    Args:
        prompt: Prompt tokens that this engine counts.
        rows: Rows of a prompt that are kept; None for all.
        params: The request's sampling parameters, or None.
    """
    if rows is None or (params is not None and params.prompt_logprobs is not None):
        return 0
    extra = getattr(params, "extra_args", None) or {}
    transfer = extra.get("kv_transfer_params") or {}
    cut = LEFT_TO_DECODER if transfer.get("_p_side_truncated") else 0
    return decoder_start(prompt + cut, rows)
