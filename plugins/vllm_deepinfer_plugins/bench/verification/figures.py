"""From slices to figures: paired by round, so that what both sides of a pair suffer cancels."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from vllm_deepinfer.bench.figure import Figure
from vllm_deepinfer.bench.scheduler.chart import scatter

from .plan import ADAPTIVE, FIXED, OFF, TOO_SURE, UNSURE

TARGETS = {
    "adaptive_over_best_fixed_min": ">= 0.98",
    "adaptive_over_fixed5_geomean": ">= 1.06",
    "scripted_over_optimum_min": ">= 0.99",
    "decision_ms_256x5": "<= 0.3",
    "survival_ece_after": "<= 0.02",
}
Cell = tuple[str, int]
"""Traffic and concurrency."""


@dataclass
class Measured:
    """Tokens per second by cell, setting and round; the same length within a cell but for variants.

    Attributes:
        foreign: largest share of all cores that other processes used, by slice that was kept.
    """

    rates: dict[Cell, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(dict))
    foreign: list[float] = field(default_factory=list)

    def add(self, cell: Cell, setting: str, rate: float, foreign: float | None) -> None:
        """One slice."""
        self.rates[cell].setdefault(setting, []).append(rate)
        self.foreign.append(foreign or 0.0)

    def ratio(self, cell: Cell, ours: str, other: str) -> float:
        """Median over the rounds."""
        rates = self.rates[cell]
        return median(a / b for a, b in zip(rates[ours], rates[other], strict=True))

    def over_best(self, cell: Cell, ours: str = ADAPTIVE) -> float:
        """Against the fixed number of drafts that it does worst against."""
        return min(self.ratio(cell, ours, other) for other in FIXED)

    def cells(self, ours: str = ADAPTIVE) -> list[Cell]:
        """Those where the setting was measured."""
        return [cell for cell, rates in self.rates.items() if ours in rates]


def geomean(values: Sequence[float]) -> float:
    """Geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def sweep_figures(measured: Measured) -> list[Figure]:
    """Adaptive verification against settings that never change, at all points."""
    worst = [measured.over_best(cell) for cell in measured.cells()]
    five = [measured.ratio(cell, ADAPTIVE, FIXED[-1]) for cell in measured.cells()]
    off = [measured.ratio(cell, ADAPTIVE, OFF) for cell in measured.cells()]
    found = [
        _figure("adaptive_over_best_fixed_min", min(worst), "ratio", worst),
        _figure("adaptive_over_fixed5_geomean", geomean(five), "ratio", five),
    ]
    found.append(_figure("adaptive_over_off_min", min(off), "ratio", off))
    for ours, name in ((TOO_SURE, "too_sure"), (UNSURE, "no_confidences")):
        if values := [measured.over_best(cell, ours) for cell in measured.cells(ours)]:
            found.append(_figure(f"adaptive_over_best_fixed_min_{name}", min(values), "ratio", values))
    return found


def _figure(name: str, value: float, unit: str, values: Sequence[float]) -> Figure:
    return Figure(
        name=name, value=value, unit=unit, spread=(min(values), max(values)), target=TARGETS.get(name)
    )


def other_figures(
    optimum: Sequence[float],
    decisions: Sequence[float],
    before: Mapping[int, float],
    after: Mapping[int, float],
) -> list[Figure]:
    """The rest.

    Args:
        optimum: per small batch. decisions: milliseconds of each.
        before, after: ECE of survival by position, and under 0 their mean.
    """
    return [
        _figure("scripted_over_optimum_min", min(optimum), "ratio", optimum),
        _figure("decision_ms_256x5", median(decisions), "ms", decisions),
        _figure("survival_ece_after", after[0], "share", list(after.values())),
        _figure("survival_ece_before", before[0], "share", list(before.values())),
    ]


def series(measured: Measured) -> list[dict[str, Any]]:
    """Every cell: medians, and the rounds behind them."""
    return [
        {
            "traffic": traffic,
            "concurrency": concurrency,
            "tokens_per_second": {name: round(median(each), 1) for name, each in rates.items()},
            "over_best_fixed": round(measured.over_best((traffic, concurrency)), 4),
            "over_off": round(measured.ratio((traffic, concurrency), ADAPTIVE, OFF), 4),
            "over_fixed5": round(measured.ratio((traffic, concurrency), ADAPTIVE, FIXED[-1]), 4),
            "rounds": {name: [round(each, 1) for each in one] for name, one in rates.items()},
        }
        for (traffic, concurrency), rates in measured.rates.items()
    ]


def charts(measured: Measured) -> dict[str, str]:
    """Traffic to SVG: every setting's tokens per second over those of the best that never changes."""
    found = {}
    for traffic in dict.fromkeys(cell[0] for cell in measured.rates):
        points: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
        for cell in (cell for cell in measured.rates if cell[0] == traffic):
            medians = {name: median(each) for name, each in measured.rates[cell].items()}
            top = max(medians[name] for name in FIXED)
            for name, value in medians.items():
                kind, _, drafts = name.partition(" ") if name in FIXED else (name, "", "")
                points[kind].append((cell[1], value / top, drafts))
        title = f"{traffic} traffic: 1.0 is the best number of drafts that never changes"
        found[traffic] = scatter(title, "requests at a time", "tokens/s over the best fixed", points)
    return found
