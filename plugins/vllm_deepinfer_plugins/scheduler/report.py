"""What a finished step has to say, and how it gets from the engine's process to `/metrics`.

vLLM encodes SchedulerStats by its declared fields, and only one of them is an open table of integers that is
always there: `num_kv_fetch_reqs_by_stage`, of which vLLM reads the stages that it knows. Our entries travel
in it under a prefix, and `stat_logger` takes them out again before vLLM's own loggers see them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Self

from vllm_deepinfer.policy.itl_control import ItlControl
from vllm_deepinfer.policy.step_cost_learner import StepCostLearner

from .meter import Finished
from .planner import Planner

PREFIX = "deepinfer:"
CHUNK = "chunk:"


@dataclass(frozen=True, slots=True)
class StepReport:
    """Times in microseconds, shares in parts per million: integers, as the table holds them.

    Attributes:
        predicted, actual, period, budget: of this step; 0 where unknown or unlimited.
        decodes: requests that decoded in it.
        error_median, error_p95: of the cost model over its last steps.
        margin: target over budget.
        refits, corrections, forced, ignored_targets: how often, since the start.
        usable: whether there is a cost model to act on; 0 or 1.
        chunks: prefill tokens of this step, per request.
    """

    predicted: int
    actual: int
    period: int
    budget: int
    decodes: int
    error_median: int
    error_p95: int
    margin: int
    refits: int
    corrections: int
    forced: int
    ignored_targets: int
    usable: int
    chunks: tuple[int, ...]

    @classmethod
    def of(cls, finished: Finished, learner: StepCostLearner, control: ItlControl, planner: Planner) -> Self:
        """The state right after the step."""
        record, error = finished.record, learner.error
        return cls(
            predicted=_millionths(record.predicted),
            actual=_millionths(finished.actual),
            period=_millionths(finished.period),
            budget=_millionths(record.budget) if record.budget < 1e6 else 0,
            decodes=record.decodes,
            error_median=_millionths(error.median) if error else 0,
            error_p95=_millionths(error.p95) if error else 0,
            margin=_millionths(control.margin),
            refits=learner.refits,
            corrections=control.corrections,
            forced=planner.patience.forced,
            ignored_targets=planner.ignored_targets,
            usable=int(learner.usable),
            chunks=tuple(record.chunks),
        )

    def put_into(self, stats: Any) -> None:
        """Write it into vLLM's SchedulerStats."""
        table = stats.num_kv_fetch_reqs_by_stage
        for name, value in asdict(self).items():
            if name != "chunks":
                table[PREFIX + name] = value
        for index, chunk in enumerate(self.chunks):
            table[f"{PREFIX}{CHUNK}{index}"] = chunk

    @classmethod
    def take_from(cls, stats: Any) -> Self | None:
        """Take it out of vLLM's SchedulerStats, which is then as stock vLLM made it. None: there is none."""
        table = stats.num_kv_fetch_reqs_by_stage
        ours = {key[len(PREFIX) :]: table.pop(key) for key in _ours(table)}
        if not ours:
            return None
        chunks = tuple(value for key, value in ours.items() if key.startswith(CHUNK))
        rest = {key: value for key, value in ours.items() if not key.startswith(CHUNK)}
        return cls(**rest, chunks=chunks)


def _ours(table: Iterable[str]) -> list[str]:
    return [key for key in table if key.startswith(PREFIX)]


def _millionths(value: float) -> int:
    return round(value * 1e6)
