"""Our sampling parameters in vLLM's words."""

from __future__ import annotations

import json
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from vllm_deepinfer.engine import (
    ConstraintKind,
    GenerateRequest,
    InvalidRequest,
    KvHandOver,
    StructuredOutput,
)
from vllm_deepinfer_plugins.forced import FORCED

# Keys of `SamplingParams.extra_args`, where vLLM's server puts `vllm_xargs`: flat, as those take no nesting.
TTFT_TARGET_MS = "deepinfer_ttft_target_ms"
ITL_TARGET_MS = "deepinfer_itl_target_ms"
TRAFFIC_CLASS = "prefix_store_class"  # these two are read by kv_connector/request_options
CACHE_TTL_S = "prefix_store_ttl_s"
KV_TRANSFER = "kv_transfer_params"  # vLLM's own key


def sampling_params_of(request: GenerateRequest) -> SamplingParams:
    """vLLM's parameters for a request: no detokenising, one output per step.

    Raises: InvalidRequest for a constraint that is not well-formed.
    """
    ours = request.sampling
    return SamplingParams(
        max_tokens=ours.max_tokens,
        min_tokens=ours.min_tokens,
        temperature=ours.temperature,
        top_p=ours.top_p,
        top_k=ours.top_k,
        min_p=ours.min_p,
        seed=ours.seed,
        stop_token_ids=list(ours.stop_token_ids),
        ignore_eos=ours.ignore_eos,
        presence_penalty=ours.presence_penalty,
        frequency_penalty=ours.frequency_penalty,
        repetition_penalty=ours.repetition_penalty,
        logit_bias=dict(ours.logit_bias) or None,
        logprobs=ours.logprobs,
        prompt_logprobs=ours.prompt_logprobs,
        structured_outputs=None if ours.structured is None else _structured(ours.structured),
        extra_args=_extra_args(request) or None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,  # made for this request alone
    )


def reasoning_ended(request: GenerateRequest) -> bool | None:
    """vLLM's flag for when a constraint begins: True: at the first token; False: after the reasoning."""
    structured = request.sampling.structured
    return None if structured is None else not structured.after_reasoning


def _structured(ours: StructuredOutput) -> StructuredOutputsParams:
    match ours.kind:
        case ConstraintKind.JSON_OBJECT:
            return StructuredOutputsParams(json_object=True)
        case ConstraintKind.JSON_SCHEMA:
            _parse(ours)
            return StructuredOutputsParams(json=ours.value)
        case ConstraintKind.REGEX:
            return StructuredOutputsParams(regex=ours.value)
        case ConstraintKind.GRAMMAR:
            return StructuredOutputsParams(grammar=ours.value)
        case ConstraintKind.CHOICE:
            return StructuredOutputsParams(choice=_choices(ours))
        case ConstraintKind.STRUCTURAL_TAG:
            _parse(ours)
            return StructuredOutputsParams(structural_tag=ours.value)


def _parse(ours: StructuredOutput) -> Any:
    try:
        return json.loads(ours.value)
    except ValueError as error:
        raise InvalidRequest(f"structured output of kind {ours.kind} is not valid JSON: {error}.") from error


def _choices(ours: StructuredOutput) -> list[str]:
    choices = _parse(ours)
    if not (isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices)):
        raise InvalidRequest("structured output of kind choice must be a JSON array of strings, not empty.")
    return choices


def _extra_args(request: GenerateRequest) -> dict[str, Any]:
    targets = request.targets
    extra: dict[str, Any] = {
        TTFT_TARGET_MS: targets.ttft_ms if targets else None,
        ITL_TARGET_MS: targets.itl_ms if targets else None,
        TRAFFIC_CLASS: request.traffic_class,
        CACHE_TTL_S: request.cache_ttl_s,
        FORCED: list(request.sampling.forced) or None,
        KV_TRANSFER: _kv_transfer(request.hand_over),
    }
    return {key: value for key, value in extra.items() if value is not None}


def _kv_transfer(hand_over: KvHandOver | None) -> dict[str, Any] | None:
    if hand_over is None:
        return None
    if hand_over.keep:
        return {"do_remote_decode": True, "do_remote_prefill": False}
    return None if hand_over.source is None else dict(hand_over.source["params"])
