"""Measures steps, teaches the cost model, corrects the budget, and counts for the metrics.

Times are taken where the scheduler is called: when it has put a step together and when the step's output
comes back. With several steps in flight (asynchronous scheduling) a step begins when the one before it ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_deepinfer.policy.itl_control import ItlControl
from vllm_deepinfer.policy.step_cost import Features
from vllm_deepinfer.policy.step_cost_learner import StepCostLearner

IN_FLIGHT = 64  # steps remembered: a step whose output never comes back is forgotten after as many


@dataclass(slots=True)
class Record:
    """A step that is under way.

    Attributes:
        started: when it was handed over.
        features: what it computes.
        predicted: seconds it should take; 0: the model was not usable.
        budget: seconds it may take; infinite where nobody decodes.
        decodes: requests that decode in it.
        chunks: prefill tokens per request.
        plain: nothing in it that the cost model knows nothing of: no encoder, no blocking load.
    """

    started: float
    features: Features
    predicted: float
    budget: float
    decodes: int
    chunks: list[int]
    plain: bool


@dataclass(slots=True)
class Finished:
    """A step that has ended; seconds, or 0 where unknown."""

    record: Record
    actual: float
    period: float
    refitted: bool


@dataclass(slots=True)
class Meter:
    """The clock side of the scheduler; the clock itself is passed in as times.

    Attributes:
        learner: learns from plain steps.
        control: learns from steps with decodes.
    """

    learner: StepCostLearner
    control: ItlControl
    _in_flight: dict[int, Record] = field(default_factory=dict)
    _ended: float = 0.0

    def began(self, key: int, record: Record) -> None:
        """A step was handed over; `key` finds it again."""
        self._in_flight[key] = record
        if len(self._in_flight) > IN_FLIGHT:
            del self._in_flight[next(iter(self._in_flight))]

    def ended(self, key: int, now: float) -> Finished | None:
        """Its output is back. None: it is unknown, or computed nothing."""
        record = self._in_flight.pop(key, None)
        if record is None:
            return None
        actual = now - max(self._ended, record.started)
        period = now - self._ended if self._ended and record.decodes else actual
        self._ended = now
        if record.decodes and record.predicted:  # steps without a chunk too: see ItlControl.observe
            self.control.observe(record.predicted, record.budget, period)
        refitted = record.plain and self.learner.observe(record.features, actual)
        return Finished(record, actual, period, refitted)
