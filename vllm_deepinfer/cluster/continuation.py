"""A request that goes on at another engine after its own was lost.

Most answers go on from prompt + emitted tokens. Where a constraint, a seed or a penalty counts the answer
from its first token, that would be another answer: then the prompt is answered again with the emitted tokens
forced (`SamplingParams.forced`), and what the caller has is cut off. It costs the steps again, and is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vllm_deepinfer.engine import GenerateRequest, TokenDelta


def continued(request: GenerateRequest, emitted: Sequence[int], request_id: str) -> GenerateRequest:
    """The rest of a request, under a new id.

    The emitted tokens become prompt, and the limits count what is left. `counted` says when that would not be
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
        forced=sampling.forced[count:],
    )
    prompt = [*request.prompt_token_ids, *emitted]
    return msgspec.structs.replace(request, request_id=request_id, prompt_token_ids=prompt, sampling=rest)


def repeated(request: GenerateRequest, emitted: Sequence[int], request_id: str) -> GenerateRequest:
    """The whole request again, under a new id, with the emitted tokens forced."""
    forced = [*emitted, *request.sampling.forced[len(emitted) :]]
    sampling = msgspec.structs.replace(request.sampling, forced=forced, prompt_logprobs=None)
    return msgspec.structs.replace(request, request_id=request_id, sampling=sampling)


class Repeats:
    """Cuts off what an attempt repeats.

    Args:
        tokens: what the caller has already, and the attempt will give again.
    """

    __slots__ = ("_at", "_tokens")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens, self._at = tokens, 0

    @property
    def spent(self) -> bool:
        """Whether nothing more is repeated: `cut` would give any delta back as it is."""
        return self._at >= len(self._tokens)

    def cut(self, delta: TokenDelta) -> TokenDelta | None:
        """What of the delta is new; None: nothing. Raises: ValueError when the engine gives other tokens."""
        due = self._tokens[self._at : self._at + len(delta.token_ids)]
        if not due:
            return delta
        if list(delta.token_ids[: len(due)]) != list(due):
            raise ValueError(f"{delta.token_ids[: len(due)]} instead of {due}")
        self._at += len(due)
        if len(due) == len(delta.token_ids) and not delta.final:
            return None
        logprobs = None if delta.logprobs is None else delta.logprobs[len(due) :]
        return msgspec.structs.replace(delta, token_ids=delta.token_ids[len(due) :], logprobs=logprobs)


def resumed(
    request: GenerateRequest, emitted: Sequence[int], request_id: str
) -> tuple[GenerateRequest, Repeats]:
    """What another engine is asked for, and what of its answer is not new."""
    if emitted and counted(request) is not None:
        return repeated(request, emitted, request_id), Repeats(tuple(emitted))
    return continued(request, emitted, request_id), Repeats()


def counted(request: GenerateRequest) -> str | None:
    """What counts an answer from its first token, if anything does."""
    sampling = request.sampling
    if sampling.structured is not None:
        return "a constraint starts with the first token"
    if sampling.seed is not None:
        return "a seeded answer's draws are counted from its first token"
    if sampling.presence_penalty or sampling.frequency_penalty:
        return "presence and frequency penalties count the answer's tokens"
    return None


def why_not(request: GenerateRequest, emitted: Sequence[int], forces: bool = False) -> str | None:
    """Why the rest could not be the same answer, to follow "cannot go on elsewhere: "; or None.

    Args:
        forces: whether the engines do `SamplingParams.forced`.
    """
    return None if not emitted or forces else counted(request)
