"""One request of ours inside vLLM, and the deltas that its outputs become."""

from __future__ import annotations

from typing import Any

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine import FinishReason as CoreFinishReason

from vllm_deepinfer.engine import (
    LOST,
    UNBUILT,
    FinishReason,
    GenerateRequest,
    Sink,
    TokenDelta,
    TokenLogprobs,
)
from vllm_deepinfer_plugins.hand_over.settings import STORE_KEY

FINISH_REASONS = {
    CoreFinishReason.STOP: FinishReason.STOP,
    CoreFinishReason.LENGTH: FinishReason.LENGTH,
    CoreFinishReason.ABORT: FinishReason.ABORT,
    CoreFinishReason.ERROR: FinishReason.ERROR,
    CoreFinishReason.REPETITION: FinishReason.STOP,  # only on request, and we never ask for it
}


class Entry:
    """What is remembered of a request between its steps.

    Attributes:
        internal_id: vLLM's own id for it; None until vLLM has it.
        started: it has produced a token. ended: its final delta has been delivered, or it was never accepted.
        cached_tokens: prompt tokens served by the prefix cache.
        held: it has ended and its KV waits for another engine.
    """

    __slots__ = (
        "_kv_layout",
        "_prompt_logprobs",
        "_speculates",
        "cached_tokens",
        "ended",
        "held",
        "internal_id",
        "request",
        "sink",
        "started",
    )

    def __init__(self, request: GenerateRequest, sink: Sink, speculates: bool, kv_layout: str = "") -> None:
        self.request = request
        self.sink = sink
        self.internal_id: str | None = None
        self.started = False
        self.ended = False
        self.cached_tokens = 0
        self.held = False
        self._speculates = speculates
        self._kv_layout = kv_layout
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None

    def delta(self, output: EngineCoreOutput) -> TokenDelta | None:
        """The delta of one output; None when it carries nothing for the caller."""
        if output.prefill_stats is not None and not self.started:
            self.cached_tokens = output.prefill_stats.num_cached_tokens
        if output.new_prompt_logprobs_tensors is not None:
            self._prompt_logprobs = _prompt_logprobs(output.new_prompt_logprobs_tensors)
        tokens, reason = output.new_token_ids, None
        if output.finish_reason is not None:
            reason, self.ended = FINISH_REASONS[output.finish_reason], True
        elif not tokens:
            return None
        accepted = len(tokens) - 1 if self._speculates and self.started and tokens else 0
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        self.started = self.started or bool(tokens)
        wants_logprobs = self.request.sampling.logprobs is not None
        return TokenDelta(
            self.request.request_id,
            tokens,
            reason,
            self._stop_reason(output, reason),
            logprobs_of(output.new_logprobs, len(tokens)) if wants_logprobs else None,
            prompt_logprobs,
            self.cached_tokens,
            accepted,
            "vLLM failed this request; its log says why." if reason is FinishReason.ERROR else None,
            self._kv_source(output),
        )

    def end(self, reason: FinishReason, error: str | None = None) -> TokenDelta:
        """The final delta of a request that ends outside a step."""
        self.ended = True
        lost = LOST if reason is FinishReason.ERROR else None
        return TokenDelta(
            self.request.request_id, (), reason, lost, cached_tokens=self.cached_tokens, error=error
        )

    def _kv_source(self, output: EngineCoreOutput) -> dict[str, Any] | None:
        hand_over = self.request.hand_over
        if hand_over is None or not hand_over.keep or not output.kv_transfer_params:
            return None
        self.held = STORE_KEY not in output.kv_transfer_params  # the store holds it by itself
        return {"layout": self._kv_layout, "params": output.kv_transfer_params}

    def _stop_reason(self, output: EngineCoreOutput, reason: FinishReason | None) -> int | str | None:
        if reason is FinishReason.ERROR and self.request.sampling.structured is not None and not self.started:
            return UNBUILT  # vLLM checks a constraint before it takes it, and cannot build some that passed
        if reason is not FinishReason.STOP:
            return None
        # vLLM makes the model's further end-of-sequence ids stop tokens of the request; the caller did not
        stop = output.stop_reason
        return stop if isinstance(stop, str) or stop in self.request.sampling.stop_token_ids else None


def logprobs_of(lists: Any, count: int) -> list[TokenLogprobs]:
    """One entry per token from vLLM's arrays [count, 1 + k]: the sampled token, then the most likely."""
    if lists is None:
        return []
    rows = zip(
        lists.logprob_token_ids.tolist(),
        lists.logprobs.tolist(),
        lists.sampled_token_ranks.tolist(),
        strict=True,
    )
    entries = [
        TokenLogprobs(ids[0], values[0], rank, tuple(zip(ids[1:], values[1:], strict=True)))
        for ids, values, rank in rows
    ]
    assert len(entries) == count, "one row of logprobs per token"
    return entries


def _prompt_logprobs(tensors: Any) -> list[TokenLogprobs | None]:
    """vLLM's tensors [prompt - 1, 1 + k] as one entry per prompt token; the first has no predecessor."""
    token_ids, values, ranks, *_ = tensors
    rows = zip(token_ids.tolist(), values.tolist(), ranks.tolist(), strict=True)
    return [None, *(TokenLogprobs(i[0], v[0], r, tuple(zip(i[1:], v[1:], strict=True))) for i, v, r in rows)]
