"""A step cost that learns while it is used: follows drift within tens of steps, refits every hundred.

Two corrections at two speeds. A factor, the median of actual over fitted during the last steps, follows a
machine that gets slower or a neighbour that comes and goes: a median of 32 forgets a stall at once and
recovers 16 steps after contention ends, so no spell of bad samples lasts. The coefficients are refitted more
slowly, from samples of all shapes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from statistics import median

from .step_cost import Features, StepCost
from .step_cost_fit import COEFFICIENTS, fit
from .step_samples import Sample, Samples

WARM_UP = 3  # first steps, which allocate and compile: never learned from
RECENT = 32  # steps that the factor is the median of
REFIT_EVERY = 128  # steps
SURPRISES = 4  # steps in a row that are off by SURPRISE: the fit lacks something, refit now
SURPRISE = 0.25
ERRORS = 512  # steps that the model's own error is told over
LEAST_SAMPLES = 24
LARGEST_ERROR = 0.35  # median relative error above which a fit is of no use
FACTOR_BOUNDS = (0.1, 10.0)


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative error of predictions made before the step ran: median and 95th percentile."""

    median: float
    p95: float


class StepCostLearner:
    """Learns a `StepCost` from (features, seconds) pairs.

    Attributes:
        refits: how often the coefficients were fitted anew.
    """

    def __init__(self, empty: StepCost, known: StepCost | None = None) -> None:
        """
        Args:
            empty: gives attention bound and tile; its coefficients are the prior of the first fit.
            known: an earlier fit for this very model and machine; usable at once.
        """
        self._fitted = known or empty
        self._usable = known is not None
        self._samples = Samples()
        self._recent: dict[bool, deque[Sample]] = {side: deque(maxlen=RECENT) for side in (False, True)}
        self._ratios: dict[bool, deque[float]] = {side: deque(maxlen=RECENT) for side in (False, True)}
        self._errors: deque[float] = deque(maxlen=ERRORS)
        self._scaled: dict[bool, StepCost] = {}
        self._surprises = 0
        self._since_refit = 0
        self._to_skip = WARM_UP
        self.refits = 0

    @property
    def usable(self) -> bool:
        """Whether predictions are worth acting on."""
        return self._usable

    @property
    def fitted(self) -> StepCost:
        """The coefficients alone, without the factor: what is worth saving."""
        return self._fitted

    def cost(self, prefill: bool = True) -> StepCost:
        """The model as of now, for steps with or without prefill."""
        if prefill not in self._scaled:
            self._scaled[prefill] = scaled(self._fitted, self._factor(prefill))
        return self._scaled[prefill]

    def predict(self, features: Features) -> float:
        """Seconds that a step with these features takes, as of now."""
        return self.cost(features.tokens > 0).seconds(features)

    @property
    def error(self) -> FitError | None:
        """Error over the last steps; None before the first prediction."""
        if not self._errors:
            return None
        ordered = sorted(self._errors)
        return FitError(median(ordered), ordered[int(0.95 * (len(ordered) - 1))])

    def observe(self, features: Features, seconds: float) -> bool:
        """Learn from a finished step. Returns whether the coefficients were refitted."""
        if seconds <= 0 or not (features.tokens or features.decodes):
            return False
        if self._to_skip:
            self._to_skip -= 1
            return False
        if self._usable:
            self._note_error((self.predict(features) - seconds) / seconds)
        prefill = features.tokens > 0
        self._recent[prefill].append(self._samples.add(features, seconds))
        self._note_ratio(prefill, self._fitted.seconds(features), seconds)
        self._since_refit += 1
        if not self._due():
            return False
        self._refit()
        return True

    def _note_error(self, relative: float) -> None:
        self._errors.append(abs(relative))
        self._surprises = self._surprises + 1 if abs(relative) > SURPRISE else 0

    def _due(self) -> bool:
        if self._samples.seen < LEAST_SAMPLES or self._samples.chunk_shapes() < 3:
            return False  # until then there is the known fit, or nothing
        if not self._usable:
            return self._since_refit >= LEAST_SAMPLES or not self.refits
        return self._since_refit >= REFIT_EVERY or self._surprised()

    def _surprised(self) -> bool:
        """Often off, and not because this machine is slower all over: at most one refit every 16 steps."""
        return self._surprises >= SURPRISES and self._since_refit >= 16

    def _refit(self) -> None:
        samples = self._samples.all()
        self._fitted = fit(samples, self._fitted)
        for prefill, recent in self._recent.items():
            self._ratios[prefill].clear()
            for sample in recent:
                self._note_ratio(prefill, self._fitted.seconds(sample.features), sample.seconds)
        self.refits += 1
        self._since_refit = self._surprises = 0
        if not self._usable:
            errors = [abs(self._fitted.seconds(s.features) - s.seconds) / s.seconds for s in samples]
            self._usable = median(errors) <= LARGEST_ERROR

    def _note_ratio(self, prefill: bool, fitted: float, seconds: float) -> None:
        if fitted > 0:
            self._ratios[prefill].append(seconds / fitted)
        self._scaled.pop(prefill, None)

    def _factor(self, prefill: bool) -> float:
        ratios, (low, high) = self._ratios[prefill], FACTOR_BOUNDS
        return min(max(median(ratios), low), high) if len(ratios) >= 4 else 1.0


def scaled(cost: StepCost, factor: float) -> StepCost:
    """The same model on a machine that takes `factor` times as long."""
    return replace(cost, **{name: getattr(cost, name) * factor for name in COEFFICIENTS})
