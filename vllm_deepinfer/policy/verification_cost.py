"""What a round of drafting and verifying takes, as a function of which drafts are verified.

    T(S) = base[|S|] + Σ own of the drafts in S

`base` has whatever shape the machine has: tiles, graph sizes, the experts that so many rows touch. `own` is a
draft's attention at its request's context. One table over tokens, as published so far, knows neither.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from .step_cost import Features, StepCost

Vector = NDArray[np.float64]
Lengths = NDArray[np.int64]
NOTHING = Features()


@dataclass(frozen=True, slots=True)
class SlotCosts:
    """The cost of one round's choices.

    Attributes:
        base: [n + 1] seconds with 0 … n drafts verified, without their own share; finite, > 0.
        own: [requests, drafts] seconds that each draft adds by itself; finite, ≥ 0, never falls along a row.
        aside: seconds of the step that are prefill's own, and in neither.
    """

    base: Vector
    own: Vector
    aside: float = 0.0

    def __post_init__(self) -> None:
        if len(self.base) != self.own.size + 1:
            raise ValueError(f"{self.own.size} drafts need a base of one more entry, got {len(self.base)}.")


class RowResiduals:
    """How far steps of so many rows are from what the step cost says, learned from steps without prefill.

    A step cost is linear between tiles. What a batch's shape does beyond that (another kernel from 5 rows on,
    more experts to read) shows up here. The median of the last steps of a size, drawn towards none while they
    are few; between sizes that were seen it is interpolated.
    """

    LAST = 16  # steps per size
    DOUBT = 4.0  # steps that are as good as the assumption of no residual
    BOUNDS = (-0.5, 1.0)
    EXACT = 32  # rows up to which every size is its own; above, sizes within 4 % of one another are one

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[int, float]]] = {}
        self._summaries: dict[int, tuple[float, float]] = {}
        self._rows: Vector = np.zeros(0)
        self._relative: Vector = np.zeros(0)

    def observe(self, rows: int, predicted: float, seconds: float) -> None:
        """A step without prefill has ended.

        Args:
            rows: tokens that it computed.
            predicted: by the step cost, without residuals. seconds: what it took.
        """
        if rows < 1 or not (0 < predicted < math.inf and 0 < seconds < math.inf):
            return
        bucket = rows if rows <= self.EXACT else self.EXACT + int(16 * math.log2(rows / self.EXACT))
        seen = self._seen.setdefault(bucket, deque(maxlen=self.LAST))
        seen.append((rows, seconds / predicted - 1))
        self._summaries[bucket] = self._summary(seen)
        table = sorted(self._summaries.values())
        self._rows, self._relative = (np.array(column) for column in zip(*table, strict=True))

    def at(self, rows: Vector) -> Vector:
        """Relative residual at these numbers of rows: 0.1: a step takes 10 % longer than predicted."""
        if not len(self._rows):
            return np.zeros(len(rows))
        return np.interp(rows, self._rows, self._relative)

    def _summary(self, seen: deque[tuple[int, float]]) -> tuple[float, float]:
        rows, relative = zip(*seen, strict=True)
        low, high = self.BOUNDS
        trust = len(seen) / (len(seen) + self.DOUBT)
        return sum(rows) / len(rows), min(max(median(relative) * trust, low), high)


@dataclass(frozen=True, slots=True)
class RoundCost:
    """The step cost, and what a round has beside the step.

    Attributes:
        step: predicts the step; its tile is one source of jags.
        draft_per_step, draft_per_request: seconds that drafting takes, ≥ 0. A drafter that runs within the
            measured step is in `step` already: leave them 0.
        sizes: rows that a step is padded to, ascending, such as CUDA graph sizes; steps above are not padded.
        residuals: what was learned about sizes.
    """

    step: StepCost
    draft_per_step: float = 0.0
    draft_per_request: float = 0.0
    sizes: tuple[int, ...] = ()
    residuals: RowResiduals | None = None

    def __post_init__(self) -> None:
        for name in ("draft_per_step", "draft_per_request"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"the round's {name} must be a finite number ≥ 0, got {getattr(self, name)}."
                )
        if list(self.sizes) != sorted(set(self.sizes)) or any(size < 1 for size in self.sizes):
            raise ValueError(f"graph sizes must ascend from at least 1 row, got {self.sizes}.")

    def slots(self, contexts: Vector, drafts: int, others: Features = NOTHING) -> SlotCosts:
        """What each choice costs in a step with these decodes.

        Prefill in the step shifts where the jags are. Its own time is put aside, not divided among the
        drafts: it has to be spent in some step whatever is verified here, so counting it would make every
        draft look cheap beside it.

        Args:
            contexts: [requests] tokens before each decode's own.
            drafts: most drafts of a request.
            others: prefill that shares the step; its `decodes` are requests without drafts.
        """
        counts = np.arange(len(contexts) * drafts + 1, dtype=np.float64)
        decodes = len(contexts) + others.decodes
        plain = self.decodes(contexts) + Features(
            decodes=others.decodes, decode_context=others.decode_context
        )
        base, aside = self._seconds(plain, counts), 0.0
        if others.tokens:
            mixed = self._seconds(plain + _prefill_of(others), counts)
            aside = float(mixed[0] - base[0])
            base = mixed - aside
        elif self.residuals is not None:
            base = base * (1.0 + self.residuals.at(decodes + counts))
        drafting = self.draft_per_step + self.draft_per_request * len(contexts)
        return SlotCosts(base + drafting, self._own(contexts, drafts), aside)

    def decodes(self, contexts: Vector) -> Features:
        """What the decodes put into a step's features without drafts."""
        return Features(decodes=len(contexts), decode_context=self._scanned(contexts))

    def drafts(self, contexts: Vector, lengths: Lengths) -> Features:
        """What verifying these drafts adds to a step's features."""
        pairs = self._pairs(contexts, int(lengths.max(initial=0)))
        chosen = np.arange(pairs.shape[1]) < lengths[:, None]
        return Features(tokens=float(lengths.sum()), attended=float(pairs[chosen].sum()))

    def _seconds(self, features: Features, counts: Vector) -> Vector:
        """`StepCost.seconds` for these numbers of drafts more, padding included, their pairs not."""
        step = self.step
        rest = (
            step.per_step
            + step.per_pair * features.attended
            + step.per_decode * features.decodes
            + step.per_decode_context * features.decode_context
            + step.per_prefill_context * features.prefill_context
        )
        return rest + step.per_token * self._computed(features.tokens + counts, features.decodes)

    def _computed(self, tokens: Vector, decodes: float) -> Vector:
        """Tokens that kernels compute for these: padded to the next graph size, else to whole tiles."""
        tiled = np.ceil(tokens / self.step.tile) * self.step.tile
        if not self.sizes:
            return tiled
        sizes = np.array(self.sizes, dtype=np.float64)
        at = np.searchsorted(sizes, tokens + decodes)
        padded = sizes[np.minimum(at, len(sizes) - 1)] - decodes
        return np.where(at < len(sizes), padded, tiled)

    def _own(self, contexts: Vector, drafts: int) -> Vector:
        if not self.step.per_pair:
            return np.zeros((len(contexts), drafts))
        return self.step.per_pair * self._pairs(contexts, drafts)

    def _pairs(self, contexts: Vector, drafts: int) -> Vector:
        """Keys that the j-th draft attends to: `AttentionBound.attended` taken apart."""
        pairs = contexts[:, None] + (np.arange(drafts) + 0.5)
        return np.minimum(pairs, self.step.attention.span)

    def _scanned(self, contexts: Vector) -> float:
        attention = self.step.attention
        if attention.window is None or attention.top_k is not None:
            return float(contexts.sum())
        return float(np.minimum(contexts, attention.window).sum())


def _prefill_of(features: Features) -> Features:
    return Features(features.tokens, features.attended, 0.0, 0.0, features.prefill_context)
