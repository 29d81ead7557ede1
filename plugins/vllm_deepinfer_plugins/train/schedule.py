"""What changes in a training: the rate, the length of the rows, and when the selection comes into force."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """By the number of a step alone, so that a resumed training goes on as it would have.

    Attributes:
        steps: Steps in all.
        tokens: Tokens of a step, a multiple of every length.
        lengths: Length of the rows, each from a fraction of the steps on, increasing from 0.
        sparse: Fraction of the steps with dense attention, in which the indexer warms up.
        warmup: Steps in which the rate rises.
        cooldown: Fraction of the steps, at the end, in which it falls to a fiftieth.
    """

    steps: int
    tokens: int = 4096
    lengths: tuple[tuple[float, int], ...] = ((0.0, 512), (0.5, 1024))
    sparse: float = 0.4
    warmup: int = 24
    cooldown: float = 0.5

    def rate(self, step: int) -> float:
        """Factor of the peak rate at a step from 0 on."""
        rising = (step + 1) / max(1, self.warmup)
        falling = (self.steps - step) / max(1.0, self.cooldown * self.steps)
        return min(1.0, rising, 0.02 + 0.98 * falling)

    def shape(self, step: int) -> tuple[int, int]:
        """Rows and their length at a step."""
        length = next(size for start, size in reversed(self.lengths) if step >= start * self.steps)
        return self.tokens // length, length

    def selects(self, step: int) -> bool:
        """Whether the indexer's selection is in force at a step."""
        return step >= self.sparse * self.steps
