"""Decides step after step how many drafts of each request are verified. One decision, made in one place.

`Form.DELAYED` is for production: the number from confidences of `delay` steps ago, who gets them from those
of now. Where confidences do not come from the drafts themselves but are estimated from the past (drafters
without a confidence head), nothing can leak and the delay may be 0. `Form.SYNCHRONOUS` is Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from .step_cost import Features
from .verification import Curve, assign, predict, survival, synchronous
from .verification_cost import NOTHING, Lengths, RoundCost, Vector
from .verification_memory import Delayed, Exploration


class Form(StrEnum):
    """How the choice keeps from looking at the tokens that it decides about."""

    DELAYED = "delayed"
    SYNCHRONOUS = "synchronous"


class Reason(StrEnum):
    """Where a decision comes from. Those in `FALLBACKS` verify everything and are to be counted."""

    SCHEDULED = "scheduled"
    EXPLORED = "explored"
    NO_DRAFTS = "no_drafts"
    NO_HISTORY = "no_history"
    NO_COST = "no_cost"
    NOT_A_NUMBER = "not_a_number"


FALLBACKS = frozenset({Reason.NO_HISTORY, Reason.NO_COST, Reason.NOT_A_NUMBER})


@dataclass(frozen=True, slots=True)
class Rule:
    """What an operator sets.

    Attributes:
        form, delay: see above; steps.
        min_gain: predicted gain from which the number of drafts changes, so that noise does not move it.
        explore_share: most of the time that trying other numbers may be predicted to lose; 0: never.
        explore_every: steps from one try to the next, at least.
    """

    form: Form = Form.DELAYED
    delay: int = 2
    min_gain: float = 0.01
    explore_share: float = 0.005
    explore_every: int = 16

    def __post_init__(self) -> None:
        if not 0 <= self.min_gain < math.inf:
            raise ValueError(f"min_gain must be a finite number ≥ 0, got {self.min_gain}.")
        Delayed(self.delay)
        Exploration(self.explore_share, self.explore_every)


@dataclass(frozen=True, slots=True)
class Drafts:
    """What was drafted for the decodes of a step.

    Attributes:
        keys: [requests] names; a request keeps its own.
        contexts: [requests] tokens before each decode's own.
        drafted: [requests] drafts that there are.
        confidences: [requests, drafts] calibrated probability of each if all before it are accepted.
    """

    keys: Sequence[str]
    contexts: Vector
    drafted: Lengths
    confidences: Vector


@dataclass(frozen=True, slots=True)
class Decision:
    """How many drafts of each request are verified.

    Attributes:
        lengths: [requests].
        reason: where that comes from.
        tokens: expected of the step; None where nothing is predicted.
        seconds: predicted for the round, prefill's own time aside; None as above.
        gain: predicted rate over that of verifying everything, 1.0: the same; None as above.
        plain: seconds predicted for a round that verifies nothing; None as above.
    """

    lengths: Lengths
    reason: Reason
    tokens: float | None = None
    seconds: float | None = None
    gain: float | None = None
    plain: float | None = None

    @property
    def fallback(self) -> bool:
        """Whether everything is verified for want of something: to be counted, and logged once."""
        return self.reason in FALLBACKS


class Verifier:
    """Makes the decisions of one engine."""

    def __init__(self, rule: Rule = Rule()) -> None:
        self._rule = rule
        self._delayed = Delayed(rule.delay)
        self._exploration = Exploration(rule.explore_share, rule.explore_every)
        self._share: float | None = None  # of the drafts that the last step verified; None: all of them
        self._price: float | None = None

    def decide(
        self,
        drafts: Drafts,
        cost: RoundCost | None,
        others: Features = NOTHING,
        limit: float = math.inf,
        weight: float = 1.0,
    ) -> Decision:
        """How many drafts of each request the next step verifies.

        With a confidence that is not a number everything is verified, even where that number depends on a
        draft: a drafter that gives such numbers is broken, and this is how it is found out.

        Args:
            cost: None: no usable fit.
            others: prefill, and decodes without drafts, that share the step.
            limit: seconds that the step may be predicted to take.
            weight: what a second of prefill is worth, as a multiple of a second of decoding; above 1 leaves
                it more room. 1 where no prefill waits.
        """
        there = np.arange(drafts.confidences.shape[1]) < drafts.drafted[:, None]
        broken = bool(np.isnan(drafts.confidences[there]).any())
        self._delayed.push(drafts.keys, np.where(there, drafts.confidences, np.nan))
        if not there.any():
            return Decision(drafts.drafted, Reason.NO_DRAFTS)
        if cost is None or broken:
            return Decision(drafts.drafted, Reason.NO_COST if cost is None else Reason.NOT_A_NUMBER)
        if self._rule.form is Form.SYNCHRONOUS:
            return self._synchronous(drafts, cost, others)
        old = self._delayed.of(drafts.keys)
        if old is None:
            return Decision(drafts.drafted, Reason.NO_HISTORY)
        return self._by_curve(drafts, old, cost, others, limit, weight)

    def _synchronous(self, drafts: Drafts, cost: RoundCost, others: Features) -> Decision:
        costs = cost.slots(drafts.contexts, drafts.confidences.shape[1], others)
        survived = survival(drafts.confidences, drafts.drafted)
        sure = len(drafts.keys) + others.decodes
        lengths = synchronous(survived, costs, sure)
        tokens, seconds = predict(survived, costs, sure, lengths)
        all_tokens, all_seconds = predict(survived, costs, sure, drafts.drafted)
        gain = tokens / seconds * all_seconds / all_tokens
        return Decision(lengths, Reason.SCHEDULED, tokens, seconds, gain, float(costs.base[0]))

    def _by_curve(
        self, drafts: Drafts, old: Vector, cost: RoundCost, others: Features, limit: float, weight: float
    ) -> Decision:
        costs = cost.slots(drafts.contexts, drafts.confidences.shape[1], others)
        sure = len(drafts.keys) + others.decodes
        curve = Curve.of(survival(old, drafts.drafted), costs, sure, self._price)
        room, most = limit - costs.aside, len(curve.tokens) - 1
        slots = self._steady(curve, curve.within(room, weight), room, weight)
        self._share, self._price = slots / most if most else None, curve.price
        tried = self._exploration.slots(slots, curve, drafts.drafted, room)
        reason = Reason.SCHEDULED if tried is None else Reason.EXPLORED
        slots = slots if tried is None else tried
        lengths = drafts.drafted
        if slots < most:  # else also those that were hopeless when the confidences were old
            lengths = assign(survival(drafts.confidences, drafts.drafted), costs, slots, curve.price)
        gain = float(curve.rates[slots] / curve.rates[-1])
        tokens, seconds = float(curve.tokens[slots]), float(curve.seconds[slots])
        return Decision(lengths, reason, tokens, seconds, gain, float(curve.seconds[0]))

    def _steady(self, curve: Curve, best: int, room: float, weight: float) -> int:
        """The best number, or the share of drafts of the step before where that is hardly worse."""
        most = len(curve.tokens) - 1
        before = most if self._share is None else round(self._share * most)
        if curve.seconds[before] > room or weight != 1.0:
            return best
        return best if curve.rates[best] > curve.rates[before] * (1 + self._rule.min_gain) else before
