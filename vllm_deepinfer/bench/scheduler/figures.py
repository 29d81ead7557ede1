"""The figures of issue 5, from what was measured; one that cannot be told is null with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from vllm_deepinfer.bench.figure import Figure
from vllm_deepinfer.bench.scheduler.bound import budgeted, fixed, simulate
from vllm_deepinfer.bench.scheduler.cells import Cell, Cells, Side
from vllm_deepinfer.bench.scheduler.frontier import at
from vllm_deepinfer.bench.scheduler.settings import Fixed
from vllm_deepinfer.bench.scheduler.traffic import Mix
from vllm_deepinfer.policy.itl_control import quantile
from vllm_deepinfer.policy.step_cost import StepCost

TOLERANCE = 1.1  # of a target, for both sides alike
REASON = "no setting of this run could be compared"


@dataclass
class Changing:
    """Traffic in phases, one setting for all: per phase tokens, seconds and periods.

    Attributes:
        target: of ours, in seconds.
        ours: phases of ours. stock: label to phases.
    """

    target: float
    ours: list[tuple[int, float, list[float]]] = field(default_factory=list)
    stock: dict[str, list[tuple[int, float, list[float]]]] = field(default_factory=dict)

    def ratio(self) -> float | None:
        """Ours over the best that keeps the target in every phase."""
        keeping = [
            _rate(phases)
            for phases in self.stock.values()
            if all(quantile(periods, 0.99) <= TOLERANCE * self.target for _, _, periods in phases)
        ]
        return _rate(self.ours) / max(keeping) if keeping else None


@dataclass
class Measured:
    """Everything that the figures are made of.

    Attributes:
        mixes: of each model, by name.
        costs: fitted cost of each model.
        errors: relative errors of predictions, held-out by nature: made before the step ran.
        changing: per model and round.
        ttft: setting label to seconds of every prompt of the open stream, ours under "ours".
        itl: label to the p99 ITL of that stream.
        ttft_target: seconds.
        overhead: seconds of schedule(), stock and ours.
        disturbed: windows during which other processes used the cores.
    """

    cells: Cells = field(default_factory=Cells)
    mixes: dict[str, dict[str, Mix]] = field(default_factory=dict)
    grid: Sequence[Fixed] = ()
    costs: dict[str, StepCost] = field(default_factory=dict)
    errors: dict[str, list[float]] = field(default_factory=dict)
    changing: list[Changing] = field(default_factory=list)
    ttft: dict[str, list[float]] = field(default_factory=dict)
    itl: dict[str, float] = field(default_factory=dict)
    ttft_target: float = 0.0
    overhead: tuple[list[float], list[float]] = ((), ())  # type: ignore[assignment]
    disturbed: int = 0


def figures(measured: Measured) -> tuple[Figure, ...]:
    """All of them, in the issue's order."""
    cells = measured.cells
    ours = cells.ours()
    phases = [quantile(p, 0.99) / c.target for c in measured.changing for _, _, p in c.ours if p]
    over = [side.p99 / side.target for _, side in ours if side.target] + phases
    ratios = {(cell, side.label): cells.ratio(cell, side) for cell, side in ours}
    told = [ratio for ratio in ratios.values() if ratio]
    changing = [ratio for c in measured.changing if (ratio := c.ratio())]
    long16 = [r for (cell, _), r in _tightest(cells, ratios).items() if cell[1:] == ("long", 16)]
    errors = sorted(e for one in measured.errors.values() for e in one)
    return (
        _worst("itl_p99_over_target_max", over, "<= 1.1", largest=True),
        _worst("step_p50_over_budget", [median(s.use) for _, s in ours if s.use], ">= 0.8"),
        _several("throughput_ratio_changing", changing, ">= 1.4"),
        _worst("throughput_ratio_tuned_min", told, ">= 0.98"),
        _worst("throughput_over_bound_min", _over_bound(measured, ratios), ">= 0.9"),
        _several("throughput_ratio_long_16", long16, ">= 1.25"),
        *_ttft(measured),
        _one("cost_model_median_error", median(errors) if errors else None, "ratio", "<= 0.05"),
        _one("cost_model_p95_error", quantile(errors, 0.95) if errors else None, "ratio", "<= 0.15"),
        _overhead(*measured.overhead),
    )


def bound(measured: Measured, cell: Cell, p99: float) -> float | None:
    """The ratio that the fitted model allows at this p99, without noise."""
    model, name, decodes = cell
    cost, mix = measured.costs.get(model), measured.mixes.get(model, {}).get(name)
    if cost is None or mix is None:
        return None
    stock = [simulate(cost, mix.lengths(0), decodes, fixed(setting, decodes)) for setting in measured.grid]
    ours = simulate(cost, mix.lengths(0), decodes, budgeted(cost, p99))
    best = at([(s.p99, s.throughput) for s in stock], ours.p99)
    return ours.throughput / best if best else None


def _over_bound(measured: Measured, ratios: Mapping[tuple[Cell, str], float | None]) -> list[float]:
    found = []
    for cell, side in measured.cells.ours():
        ratio, most = ratios[cell, side.label], bound(measured, cell, side.p99)
        if ratio and most:
            found.append(ratio / most)
    return found


def _tightest(cells: Cells, ratios: Mapping[tuple[Cell, str], float | None]) -> dict[tuple[Cell, str], float]:
    """Per cell ours at its smallest target: the tightest that stock reaches."""
    found = {}
    for cell in cells.sides:
        sides: list[Side] = [side for _, side in cells.ours(cell)]
        if sides:
            side = min(sides, key=lambda s: s.target or 0.0)
            best = min(cells.stock(cell), key=lambda s: s.p99, default=None)
            ratio = ratios[cell, side.label] or (side.throughput / best.throughput if best else None)
            if ratio:
                found[cell, side.label] = ratio
    return found


def _ttft(measured: Measured) -> tuple[Figure, Figure]:
    """Against the stock setting with the best median among those that keep the target, as ours must."""
    names = (("ttft_p50_ratio", 0.5, "<= 0.8"), ("ttft_p99_ratio", 0.99, "<= 1.1"))
    limit = TOLERANCE * measured.ttft_target
    keeping = {
        label: times
        for label, times in measured.ttft.items()
        if label != "ours" and times and measured.itl[label] <= limit
    }
    ours = measured.ttft.get("ours")
    if not ours or not keeping:
        first, second = (Figure.missing(name, "ratio", REASON, target) for name, _, target in names)
        return first, second
    best = min(keeping.values(), key=median)
    first, second = (
        _one(name, quantile(ours, level) / quantile(best, level), "ratio", target)
        for name, level, target in names
    )
    return first, second


def _overhead(stock: Sequence[float], ours: Sequence[float]) -> Figure:
    added = 1e3 * (median(ours) - median(stock)) if stock and ours else None
    return _one("schedule_overhead_ms", added, "ms", "<= 0.1")


def _rate(phases: Sequence[tuple[int, float, list[float]]]) -> float:
    return sum(tokens for tokens, _, _ in phases) / sum(seconds for _, seconds, _ in phases)


def _one(name: str, value: float | None, unit: str, target: str) -> Figure:
    if value is None:
        return Figure.missing(name, unit, REASON, target)
    return Figure(name=name, value=value, unit=unit, target=target)


def _several(name: str, values: Sequence[float], target: str) -> Figure:
    if not values:
        return Figure.missing(name, "ratio", REASON, target)
    return Figure.measured(name, values, "ratio", target)


def _worst(name: str, values: Sequence[float], target: str, largest: bool = False) -> Figure:
    """The worst of all cells; its spread is that over the cells."""
    if not values:
        return Figure.missing(name, "ratio", REASON, target)
    value = max(values) if largest else min(values)
    return Figure(name=name, value=value, unit="ratio", target=target, spread=(min(values), max(values)))
