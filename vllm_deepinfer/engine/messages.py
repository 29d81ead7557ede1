"""What goes into an engine and what comes out of it.

msgspec structs rather than dataclasses: one `TokenDelta` is made per token and stream, and a frozen struct
    is built in
0.06 µs where a frozen dataclass with slots takes 0.95 µs and a NamedTuple 0.34 µs (CPython 3.11, one core
of a 2-core VM); they also encode to msgpack as they are, which is how tokens travel between processes
(deltas as arrays: append new fields at the end). Treat every value as immutable.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from vllm_deepinfer.engine.errors import InvalidRequest
from vllm_deepinfer.engine.sampling import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # end-of-sequence token, a stop token, or the constraint was complete
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # `Engine.abort` was called for it
    ERROR = "error"  # the engine failed it; `TokenDelta.error` says why


LOST = "lost"
"""`TokenDelta.stop_reason` of an ERROR that came because the engine, or what it had fetched, was lost."""
UNBUILT = "unbuilt"
"""`TokenDelta.stop_reason` of an ERROR that came because the constraint of the request cannot be built."""


class Targets(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Latency that this request asks for, in milliseconds; None: whatever the engine's own target is."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("ttft_ms", self.ttft_ms), ("itl_ms", self.itl_ms)):
            if value is not None and not 0 < value < float("inf"):
                raise InvalidRequest(
                    f"the target {name} must be a positive number of milliseconds, got {value}."
                )


class KvHandOver(msgspec.Struct, frozen=True, kw_only=True):
    """What a request has to do with the KV of another engine.

    Attributes:
        keep: the KV of the prompt stays after the final delta, for another engine to fetch; that delta
            carries `TokenDelta.kv_source`. Released once fetched, by `Engine.abort`, or when a lease expires.
        source: another engine's `kv_source` of the same prompt: fetch its KV instead of computing it. The
            last position is computed here all the same, so that one engine samples every token of the answer.
    """

    keep: bool = False
    source: dict[str, Any] | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to generate.

    Attributes:
        request_id: unique among the requests that are alive in the engine.
        prompt_token_ids: the whole prompt, at least one id; a list is passed on without a copy.
        sampling: how to sample and when to stop.
        priority: lower is served first; ties by arrival.
        cache_salt: requests share prefix-cache entries only when their salts are equal (tenants).
        targets: this request's own latency targets.
        traffic_class: name of a retention class of the prefix store ("agent", "chat", …).
        cache_ttl_s: how long the prefix store keeps the prompt after its last use; None: as the class says.
        hand_over: None: the KV is made and used in this engine alone.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    cache_salt: str | None = None
    targets: Targets | None = None
    traffic_class: str | None = None
    cache_ttl_s: float | None = None
    hand_over: KvHandOver | None = None

    def __post_init__(self) -> None:
        if not self.request_id:
            raise InvalidRequest("request_id must not be empty.")
        if not len(self.prompt_token_ids):
            raise InvalidRequest("the prompt must hold at least one token, got none.")


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Natural-log probabilities at one position, as sampled from (after temperature and penalties is up to
    the engine).

    Attributes:
        token_id, logprob: the token that stands here.
        rank: 1-based rank of that token in the vocabulary.
        top: the k most likely (token id, logprob), most likely first; may or may not hold `token_id`.
    """

    token_id: int
    logprob: float
    rank: int = 1
    top: Sequence[tuple[int, float]] = ()


class TokenDelta(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What one engine step added to one request.

    Attributes:
        request_id: whose.
        token_ids: new tokens; several with speculation; none only in a final delta.
        finish_reason: set in the last delta of a request and only there.
        stop_reason: the id of `SamplingParams.stop_token_ids` that ended it; None for end-of-sequence and
            the rest. LOST with an ERROR that is no fault of the request: elsewhere it may succeed.
        logprobs: one entry per new token, if asked for.
        prompt_logprobs: one entry per prompt token (None for the first), in the first delta, if asked for.
        cached_tokens: prompt tokens that the prefix cache served; the same in every delta with tokens.
        accepted_draft_tokens: how many of `token_ids` were drafted and accepted.
        error: one sentence, with finish_reason ERROR only.
        kv_source: in the final delta of a request with `KvHandOver.keep`, unless it failed or was aborted:
            goes as it is into the `KvHandOver.source` of a request to another engine. Opaque.
    """

    request_id: str
    token_ids: Sequence[int] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    accepted_draft_tokens: int = 0
    error: str | None = None
    kv_source: dict[str, Any] | None = None

    @property
    def final(self) -> bool:
        """Whether the request has ended with this delta."""
        return self.finish_reason is not None


class Load(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How busy an engine is.

    Attributes:
        running_requests: requests with KV in the engine. waiting_requests: accepted, without any yet.
        queued_prompt_tokens: prompt tokens of requests that have not produced a token.
        kv_tokens_used, kv_tokens_free: KV capacity in tokens; blocks that only the prefix cache holds are
            free.
        held_requests: requests that have ended and whose KV waits for another engine; their KV is in use, but
            they are not active.
    """

    running_requests: int = 0
    waiting_requests: int = 0
    queued_prompt_tokens: int = 0
    kv_tokens_used: int = 0
    kv_tokens_free: int = 0
    held_requests: int = 0

    @property
    def active_requests(self) -> int:
        """Accepted requests that have not ended."""
        return self.running_requests + self.waiting_requests


class HealthState(StrEnum):
    """What to do with an engine: send work to READY ones, wait for STARTING, replace WEDGED and DEAD."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    WEDGED = "wedged"  # there is work and no step has ended for too long
    DEAD = "dead"


class Health(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Health with its reason.

    Attributes:
        state: see HealthState.
        detail: one sentence; empty when READY.
        steps: engine steps that have delivered something, ever; stands still in a wedged engine.
        idle_s: seconds since the last of these, or since work arrived if that was later; 0 without work.
        sink_failures: deliveries, ever, that were lost because their sink raised.
    """

    state: HealthState
    detail: str = ""
    steps: int = 0
    idle_s: float = 0.0
    sink_failures: int = 0

    @property
    def serving(self) -> bool:
        """Whether the engine makes progress on what it has accepted."""
        return self.state in (HealthState.READY, HealthState.DRAINING)


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change after `Engine.start`.

    Attributes:
        model: name or path of the model.
        max_model_len: prompt and answer together, in tokens.
        eos_token_ids: tokens that end an answer unless `ignore_eos`.
        block_size: tokens per KV block, the granularity of prefix hits.
        kv_capacity_tokens: KV capacity in tokens.
        vocab_size: ids are in [0, vocab_size); None: unknown.
        max_logprobs: the largest `logprobs` that the engine accepts.
        draft_tokens: most draft tokens verified per step and request; 0: no speculation.
        forces_tokens: whether `SamplingParams.forced` is done.
        kv_layout: digest of all that two engines must have in common to read each other's KV; "": it cannot
            be read by another.
        hands_over: whether requests may have a `KvHandOver`.
    """

    model: str
    max_model_len: int
    eos_token_ids: Sequence[int] = ()
    block_size: int = 1
    kv_capacity_tokens: int = 0
    vocab_size: int | None = None
    max_logprobs: int = 20
    draft_tokens: int = 0
    forces_tokens: bool = False
    kv_layout: str = ""
    hands_over: bool = False
