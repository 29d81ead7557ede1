"""Both sides of a comparison, measured in turn: adjacent pairs, shuffled rounds, disturbed pairs repeated."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .workload import Measurement

QUIET = 0.05  # largest share of all cores that other processes may use during a measurement
ATTEMPTS = 5


@dataclass(frozen=True)
class Task:
    """One thing to measure: the figure's stem, the worker's command and its arguments."""

    name: str
    do: str
    arguments: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    """One round of one task: a measurement per side, taken one right after the other."""

    sides: dict[str, Measurement]
    attempts: int = 1

    @property
    def foreign(self) -> float:
        """The larger disturbance; 0 where it is unknown."""
        return max((m.foreign or 0.0 for m in self.sides.values()), default=0.0)

    def ratio(self, ours: str, other: str) -> float:
        """Tokens per second of `ours` over those of `other`."""
        return self.sides[ours].rate / self.sides[other].rate


Measure = Callable[[str, Task], Measurement]


def take_pair(
    task: Task, order: Sequence[str], measure: Measure, patient: Callable[[], bool] = lambda: True
) -> Pair:
    """Measure every side once; again when something else used the cores meanwhile, up to five times in all.

    `patient` says before each repetition whether there is time for it.

    Whether to repeat depends on the disturbance alone, never on the result. Returns the least disturbed
    attempt.
    """
    best: Pair | None = None
    for attempt in range(1, ATTEMPTS + 1):
        pair = Pair({side: measure(side, task) for side in order}, attempt)
        if best is None or pair.foreign < best.foreign:
            best = pair
        if pair.foreign <= QUIET or not patient():
            break
    assert best is not None
    return Pair(best.sides, attempt)


def take_rounds(
    tasks: Sequence[Task],
    sides: Sequence[str],
    rounds: int,
    measure: Measure,
    rng: random.Random,
    patient: Callable[[], bool] = lambda: True,
    notify: Callable[[int, Task], None] = lambda number, task: None,
) -> dict[str, list[Pair]]:
    """`rounds` pairs per task; every round has its own order of tasks, and every task of sides."""
    pairs: dict[str, list[Pair]] = {task.name: [] for task in tasks}
    for number in range(1, rounds + 1):
        for task in rng.sample(list(tasks), len(tasks)):
            notify(number, task)
            pairs[task.name].append(take_pair(task, rng.sample(list(sides), len(sides)), measure, patient))
    return pairs


def rates(pairs: Sequence[Pair], side: str) -> list[float]:
    """Tokens per second of one side, by round."""
    return [pair.sides[side].rate for pair in pairs]


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """What the report keeps of a task: its rates and disturbance by round, and how often it was repeated."""
    return {
        "tokens_per_second": {
            side: [round(rate, 2) for rate in rates(pairs, side)] for side in sorted(pairs[0].sides)
        },
        "fastest_step_ms": {side: fastest_step(pairs, side) for side in sorted(pairs[0].sides)},
        "foreign_cpu_share": [round(pair.foreign, 4) for pair in pairs],
        "repeated": sum(pair.attempts - 1 for pair in pairs),
    }


def fastest_step(pairs: Sequence[Pair], side: str) -> float | None:
    """Milliseconds of the shortest engine step in all rounds: what a step takes when nothing disturbs it."""
    steps = [m.fastest_step for pair in pairs if (m := pair.sides[side]).fastest_step is not None]
    return round(min(steps) * 1e3, 3) if steps else None


def disturbed(pairs: Iterable[Pair]) -> int:
    """How many of the pairs that were kept other processes disturbed."""
    return sum(pair.foreign > QUIET for pair in pairs)
