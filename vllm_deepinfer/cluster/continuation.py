"""A request that goes on at another engine after its own was lost: from the prompt and what was emitted."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vllm_deepinfer.engine import GenerateRequest


def continued(request: GenerateRequest, emitted: Sequence[int], request_id: str) -> GenerateRequest:
    """The rest of a request, under a new id.

    The emitted tokens become prompt, and the limits count what is left. `why_not` says when that would not be
    the same answer.
    """
    if not emitted:
        return msgspec.structs.replace(request, request_id=request_id)
    sampling, count = request.sampling, len(emitted)
    rest = msgspec.structs.replace(
        sampling,
        max_tokens=None if sampling.max_tokens is None else sampling.max_tokens - count,
        min_tokens=max(sampling.min_tokens - count, 0),
        prompt_logprobs=None,  # delivered with the first token
    )
    prompt = [*request.prompt_token_ids, *emitted]
    return msgspec.structs.replace(request, request_id=request_id, prompt_token_ids=prompt, sampling=rest)


def why_not(request: GenerateRequest, emitted: Sequence[int]) -> str | None:
    """Why the rest could not be the same answer, to follow "cannot go on elsewhere: "; or None."""
    if not emitted:
        return None
    sampling = request.sampling
    if sampling.structured is not None:
        return "a constraint starts with the first token"
    if sampling.seed is not None:
        return "a seeded answer's draws are counted from its first token"
    if sampling.presence_penalty or sampling.frequency_penalty:
        return "presence and frequency penalties count the answer's tokens"
    return None
