"""Which tokens of a prompt are computed again after a prefix hit, and through which layers.

SWA Bounded Replay (DeepSeek-V4.1): the prefix cache holds global KV only. After a hit of H tokens the window
KV in front of H is computed again from H − W, or comes back from host memory; a hit that pays neither way is
declined. Behind the last KV source only the last rows of a prompt are computed at all.

    >>> choose(Hit(4096, 4608), window=128, cost=StepCost(0.0, 1e-3), chunk=2048)
    Choice(way=<Way.REPLAY: 'replay'>, begin=3968, seconds=0.64, saved=3.968)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .step_cost import StepCost, Work

TOKENS = StepCost(per_step=0.0, per_token=1.0)
"""Counts tokens: what to decide by until a step's cost is known."""


class Way(Enum):
    """What to do about a prefix hit."""

    RECOMPUTE = "recompute"
    """Decline it: compute every token."""
    REPLAY = "replay"
    """Adopt it and compute its last window again."""
    RESTORE = "restore"
    """Adopt it with window KV from host memory."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A prefix hit.

    Attributes:
        tokens: H, tokens whose global KV is cached.
        needed: tokens that the request has to have computed.
        restore: seconds that bringing back window KV takes; None: there is none in host memory.
    """

    tokens: int
    needed: int
    restore: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.tokens <= self.needed:
            raise ValueError(f"a hit lies between 0 and all {self.needed} tokens, got {self.tokens}.")
        if self.restore is not None and not self.restore >= 0:
            raise ValueError(f"restoring takes at least 0 seconds, got {self.restore}.")


@dataclass(frozen=True, slots=True)
class Choice:
    """What happens to a hit.

    Attributes:
        way: the decision.
        begin: the first token that is computed.
        seconds: predicted for the prefill, restoring included.
        saved: predicted seconds less than without the hit.
    """

    way: Way
    begin: int
    seconds: float
    saved: float


def choose(hit: Hit, *, window: int, cost: StepCost, chunk: int) -> Choice:
    """The cheapest way to take a hit; of equal ones that which approximates least.

    A hit of at most one window would be replayed whole, so it is only taken with restored window KV; one of
    all tokens only by a replay, because the last token must be computed for its logits.

    Args:
        window: W, tokens.
        cost: of a step.
        chunk: most tokens of a step.
    """
    cold = prefill_seconds(cost, 0, hit.needed, chunk)
    ways = [(cold, Way.RECOMPUTE, 0)]
    if hit.restore is not None and 0 < hit.tokens < hit.needed:
        ways.append(
            (hit.restore + prefill_seconds(cost, hit.tokens, hit.needed, chunk), Way.RESTORE, hit.tokens)
        )
    if hit.tokens > window:
        begin = hit.tokens - window
        ways.append((prefill_seconds(cost, begin, hit.needed, chunk), Way.REPLAY, begin))
    seconds, way, begin = min(ways, key=lambda each: each[0])
    return Choice(way, begin, seconds, cold - seconds)


def prefill_seconds(cost: StepCost, begin: int, end: int, chunk: int) -> float:
    """Predicted duration of computing tokens [begin, end) alone, in steps of at most ``chunk`` tokens."""
    if chunk < 1:
        raise ValueError(f"a step computes at least one token, got {chunk}.")
    starts = range(begin, end, chunk)
    return sum(cost.predict([Work(start, prefill_tokens=min(chunk, end - start))]) for start in starts)


def kept_rows(window: int, drafts: int) -> int:
    """Rows of a prompt that go through all layers: the window and the deepest speculative backtrack.

    Two verification steps of ``drafts`` + 1 tokens may be in flight: 128 + 2 × 6 = 140 as released.
    """
    return window + 2 * (drafts + 1)


def decoder_start(prompt: int, rows: int) -> int:
    """The first position of a prompt of ``prompt`` tokens that goes behind the last KV source.

    It depends on the prompt alone: not on chunks, so that no row is computed for nothing, and not on tokens
    that were generated before a preemption, so that they are computed again as they were.
    """
    return max(prompt - rows, 0)


def trimmed_rows(begin: int, count: int, start: int) -> int:
    """How many of the rows [begin, begin + count) end at the last KV source, given `decoder_start`."""
    return min(max(start - begin, 0), count)


def window_suffices(hit: int, start: int, window: int, floor: int) -> bool:
    """Whether window KV that was kept for a hit serves the layers behind the last KV source.

    Args:
        hit: H, where the kept window ends.
        start: `decoder_start` of the request that would use it.
        window: W, tokens.
        floor: the first position that those layers had when it was kept: a prompt's rows before its own
            `decoder_start` were never computed.
    """
    return start >= hit or floor <= max(start, hit - window + 1)
