"""One step's time, shared between verifying drafts and prefill, by what a second of it brings.

A second of decoding brings λ tokens, the best rate of `Curve`. A draft is verified where its second brings at
least `weight` · λ; prefill gets the rest of the step. With weight 1 that is what throughput wants: prefill
takes its time in this step or in another, and no draft below λ is worth a place. A weight above 1 is for
prompts that are late: the least of the drafts give way to them. Neither takes the step over its limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .prefill_budget import Prefill, StepBudget, plan
from .step_cost import Features, Work
from .verification import Curve
from .verification_cost import RoundCost, Vector


@dataclass(frozen=True, slots=True)
class Share:
    """How a step is put together.

    Attributes:
        slots: drafts that are verified. price: tokens per second to give them out by, for `assign`.
        chunks: prefill tokens by key.
        seconds: predicted for all of it, drafting included.
    """

    slots: int
    price: float
    chunks: dict[str, int]
    seconds: float


def share(
    survived: Vector,
    contexts: Vector,
    cost: RoundCost,
    prefills: Sequence[Prefill],
    limit: float,
    most_tokens: int,
    *,
    weight: float = 1.0,
    smallest: int = 0,
) -> Share:
    """Drafts and chunks of one step.

    Args:
        survived: [requests, drafts] of the decodes, by confidences that the drafts of now are not in.
        contexts: [requests] tokens before each decode's own.
        prefills: in order of who goes first.
        limit: seconds that the step may be predicted to take.
        most_tokens: that it may hold beside the decodes' own.
        weight: what a second of prefill is worth, as a multiple of a second of decoding, when not all of it
            fits.
        smallest: tokens that the first prefill gets even if nothing fits; 0 in an ordinary step. Drafts make
            room for it.
    """
    if not weight > 0:
        raise ValueError(f"a second of prefill is worth more than nothing, got a weight of {weight}.")
    costs = cost.slots(contexts, survived.shape[1])
    curve = Curve.of(survived, costs, float(len(contexts)))
    step = _Step(curve, costs.base, cost, cost.decodes(contexts), prefills, limit, most_tokens, smallest)
    room = limit - step.forced_seconds()
    found = step.with_drafts(curve.within(room))
    cut = any(found.chunks.get(each.key, 0) < each.remaining for each in prefills)
    return step.with_drafts(curve.within(room, weight)) if cut and weight != 1 else found


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that is being put together: see `share` for what is what."""

    curve: Curve
    base: Vector
    cost: RoundCost
    decodes: Features
    prefills: Sequence[Prefill]
    limit: float
    most_tokens: int
    smallest: int

    def forced_seconds(self) -> float:
        """What the smallest chunk takes, if there must be one."""
        if not (self.smallest and self.prefills):
            return 0.0
        first, step = self.prefills[0], self.cost.step
        chunk = Work(first.context, prefill_tokens=min(self.smallest, first.remaining))
        return step.predict([chunk]) - step.per_step

    def with_drafts(self, slots: int) -> Share:
        """The step with the best so many drafts, and with the prefill that fits beside them."""
        slots = min(slots, self.most_tokens)
        step, seconds = self.cost.step, float(self.curve.seconds[slots])
        own = seconds - float(self.base[slots])
        used = self.decodes + Features(tokens=slots, attended=own / step.per_pair if own else 0.0)
        beside = seconds - step.seconds(used)  # drafting, padding, residuals: what a chunk's cost lacks
        budget = StepBudget(step, used, self.limit - beside, self.most_tokens - slots)
        chunks = plan(budget, self.prefills, self.smallest)
        return Share(slots, self.curve.price, chunks, budget.predicted + beside)
