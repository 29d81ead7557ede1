"""The end of a simulated step: tokens are sampled, answers end, deltas are made."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_deepinfer.engine.messages import FinishReason, TokenDelta, TokenLogprobs
from vllm_deepinfer.engine.simulated.core import SimulatedCore, Step
from vllm_deepinfer.engine.simulated.sequence import SimulatedSequence
from vllm_deepinfer.engine.simulated.tokens import logprobs_of


def deltas_of(core: SimulatedCore, step: Step) -> Iterator[tuple[SimulatedSequence, TokenDelta]]:
    """Commit `step` and yield what each request got. The caller removes the ones that ended.

    Requests that ended while the step ran (aborted) are passed over, those still prefilling yield nothing.
    """
    for sequence, tokens, drafts in step.batch:
        if sequence.alive and core.commit(sequence, tokens):
            yield sequence, _sample(core, sequence, core.accept(drafts) if drafts else 0)


def _sample(core: SimulatedCore, sequence: SimulatedSequence, accepted: int) -> TokenDelta:
    """Sample up to `accepted` + 1 tokens; the answer may end before the last of them."""
    vocab_size = core.config.vocab_size
    first = not sequence.generated
    tokens: list[int] = []
    reason: FinishReason | None = None
    error: str | None = None
    while reason is None and len(tokens) <= accepted:
        if sequence.fail_after is not None and len(sequence.generated) >= sequence.fail_after:
            reason, error = FinishReason.ERROR, "the simulated engine was told to fail this request."
            break
        token = sequence.next_token(vocab_size)
        core.append(sequence, token)
        tokens.append(token)
        reason = sequence.finish_reason(token)
    sequence.computed += max(len(tokens) - 1, 0)  # accepted drafts already have their KV
    core.publish(sequence)
    stopped_by = sequence.generated[-1] if reason is FinishReason.STOP else None
    wanted = sequence.wanted_logprobs
    return TokenDelta(
        sequence.request.request_id,
        tokens,
        reason,
        stopped_by if stopped_by in sequence.request.sampling.stop_token_ids else None,
        None if wanted is None else [logprobs_of(token, wanted, vocab_size) for token in tokens],
        _prompt_logprobs(sequence, vocab_size) if first else None,
        sequence.cached or 0,
        min(accepted, len(tokens)),
        error,
    )


def _prompt_logprobs(sequence: SimulatedSequence, vocab_size: int) -> list[TokenLogprobs | None] | None:
    wanted = sequence.request.sampling.prompt_logprobs
    if wanted is None:
        return None
    rest = sequence.request.prompt_token_ids[1:]
    return [None, *(logprobs_of(token, wanted, vocab_size) for token in rest)]
