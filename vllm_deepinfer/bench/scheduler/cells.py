"""What was measured, by model, traffic and number of decodes, and what is read off it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from vllm_deepinfer.bench.scheduler.frontier import at
from vllm_deepinfer.policy.itl_control import quantile

Cell = tuple[str, str, int]  # model, mix, decodes


@dataclass
class Side:
    """One setting in one cell, all its rounds.

    Attributes:
        label: of the setting.
        target: ITL in seconds that ours was given; None: stock.
        throughputs: prefill tokens/s, one per round.
        periods: seconds of every step of every round.
        use: measured duration over budget of ours' steps that prefilled beside decodes.
    """

    label: str
    target: float | None = None
    throughputs: list[float] = field(default_factory=list)
    periods: list[float] = field(default_factory=list)
    use: list[float] = field(default_factory=list)

    @property
    def throughput(self) -> float:
        """Median over the rounds."""
        return median(self.throughputs)

    @property
    def p99(self) -> float:
        """Of the ITL, over all rounds."""
        return quantile(self.periods, 0.99)


@dataclass
class Cells:
    """All sides of all cells."""

    sides: dict[Cell, dict[str, Side]] = field(default_factory=dict)

    def add(
        self,
        cell: Cell,
        label: str,
        target: float | None,
        tokens: int,
        seconds: float,
        periods: list[float],
        use: list[float],
    ) -> None:
        """One round of one side."""
        side = self.sides.setdefault(cell, {}).setdefault(label, Side(label, target))
        side.throughputs.append(tokens / seconds if seconds else 0.0)
        side.periods += periods
        side.use += use

    def stock(self, cell: Cell) -> list[Side]:
        """Stock's settings in a cell."""
        return [side for side in self.sides.get(cell, {}).values() if side.target is None]

    def ours(self, cell: Cell | None = None) -> list[tuple[Cell, Side]]:
        """Ours, in one cell or in all."""
        chosen: Iterable[Cell] = self.sides if cell is None else [cell]
        return [(c, s) for c in chosen for s in self.sides.get(c, {}).values() if s.target is not None]

    def ratio(self, cell: Cell, side: Side) -> float | None:
        """Throughput over that of the best stock setting at the p99 ITL that this side measured."""
        best = at([(s.p99, s.throughput) for s in self.stock(cell)], side.p99)
        return side.throughput / best if best else None
