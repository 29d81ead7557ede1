"""From an inter-token latency to a step's budget, so that the measured percentile holds.

A step's period is what a decoding request waits for its next token. The budget that keeps its p-th percentile
at the target is target ÷ (p-th percentile of period ÷ predicted): whatever makes steps longer than predicted,
noise, drift or time between steps, is in that quotient. Uncorrected, p99 came out at 1.2 to 1.7 × the budget.
"""

from __future__ import annotations

from collections import deque

WINDOW = 160  # steps whose quotients count
FULL = 0.5  # steps that use less of their budget than this say little about full ones
FIRST_MARGIN = 1.3  # before anything is measured
TRUSTED = 100  # measured steps after which FIRST_MARGIN no longer counts
BOUNDS = (0.5, 5.0)  # of the margin
REPRICE_EVERY = 8  # steps


class ItlControl:
    """The margin between a step's budget and the ITL target.

    Attributes:
        percentile: in (0, 100).
        margin: target ÷ budget.
        corrections: how often the margin has changed by more than 1 %.
    """

    def __init__(self, percentile: float = 99.0) -> None:
        if not 0 < percentile < 100:
            raise ValueError(f"the ITL percentile must lie between 0 and 100, got {percentile}.")
        self.percentile = percentile
        self.margin = FIRST_MARGIN
        self.corrections = 0
        self._quotients: deque[float] = deque(maxlen=WINDOW)
        self._pending = 0

    def budget(self, target: float) -> float:
        """Seconds that a step may be predicted to take so that `target` holds."""
        return target / self.margin

    def observe(self, predicted: float, budget: float, period: float) -> None:
        """A step that decoded has ended, `period` seconds after the one before it.

        With or without a chunk: a margin that once got so large that no chunk fits would otherwise never see
        a step again that could unlearn it (seen: 5 tokens per step for as long as the decodes lasted).
        """
        if predicted <= 0 or predicted < FULL * budget:
            return
        self._quotients.append(period / predicted)
        self._pending += 1
        if self._pending >= REPRICE_EVERY:
            self._pending = 0
            self._reprice()

    def _reprice(self) -> None:
        measured = quantile(self._quotients, self.percentile / 100)
        doubt = max(0.0, 1 - len(self._quotients) / TRUSTED)
        low, high = BOUNDS
        margin = min(max(doubt * FIRST_MARGIN + (1 - doubt) * measured, low), high)
        if abs(margin / self.margin - 1) > 0.01:
            self.corrections += 1
            self.margin = margin


def quantile(values: deque[float] | list[float], level: float) -> float:
    """The smallest value that at least `level` of the values do not exceed."""
    ordered = sorted(values)
    rank = -int(-level * len(ordered) // 1)  # ceil
    return ordered[max(rank, 1) - 1]
