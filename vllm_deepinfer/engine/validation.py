"""Checks that hold for every engine, against its `EngineInfo`."""

from __future__ import annotations

from vllm_deepinfer.engine.errors import InvalidRequest
from vllm_deepinfer.engine.messages import EngineInfo, GenerateRequest


def check_request(request: GenerateRequest, info: EngineInfo) -> None:
    """Refuse what the engine can never serve.

    Raises: InvalidRequest with one sentence that names the value and the limit.
    """
    length = len(request.prompt_token_ids)
    if length >= info.max_model_len:
        raise InvalidRequest(
            f"the prompt has {length} tokens, but the context is {info.max_model_len} tokens and must "
            "leave room for at least one more."
        )
    _check_hand_over(request, info)
    sampling = request.sampling
    if sampling.forced and not info.forces_tokens:
        raise InvalidRequest("this engine forces no tokens; leave out forced.")
    for name, wanted in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if wanted is not None and wanted > info.max_logprobs:
            raise InvalidRequest(f"{name} must be at most {info.max_logprobs}, got {wanted}.")
    if info.vocab_size is not None:
        _check_ids(request, info.vocab_size)


def _check_hand_over(request: GenerateRequest, info: EngineInfo) -> None:
    hand_over = request.hand_over
    if hand_over is None or not (hand_over.keep or hand_over.source is not None):
        return
    if not info.hands_over:
        raise InvalidRequest("this engine hands no KV over; leave out hand_over.")
    if hand_over.keep and hand_over.source is not None:
        raise InvalidRequest("hand_over must have keep or a source, not both.")
    if hand_over.keep and request.sampling.max_tokens != 1:
        raise InvalidRequest(
            f"a request whose KV is kept must have max_tokens 1, got {request.sampling.max_tokens}."
        )


def _check_ids(request: GenerateRequest, vocab_size: int) -> None:
    prompt = request.prompt_token_ids
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        bad = next(i for i in prompt if not 0 <= i < vocab_size)
        raise InvalidRequest(f"token id {bad} of the prompt is outside the vocabulary of {vocab_size}.")
    for name in ("stop_token_ids", "logit_bias", "forced"):
        for token_id in getattr(request.sampling, name):
            if token_id >= vocab_size:
                raise InvalidRequest(f"token id {token_id} of {name} is not below {vocab_size}.")
