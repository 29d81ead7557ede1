"""How many drafts of each request are verified: the paper's Algorithm 1, and the form for production.

    maximise  Θ(S) = (sure + Σ survival of the drafts in S) / T(S)     S: a prefix of every request's drafts

- `synchronous`: best drafts first, ends before the first that does not raise Θ. The early end is what keeps
  it lossless: to look past a draft's own place would let its token speak for its own verification.
- `Curve.of` and `assign`: how many, from confidences that are old (the global maximum, over whatever shape
  the cost has); which, from those of now. The number is fixed before the tokens are drawn, and taking the
  best K in order looks at a token only when everything before it is taken: lossless as well.

Ties go to the earlier draft, then to the earlier request: never by what a token is.

    >>> costs = SlotCosts(np.array([1.0, 2.0, 1 / 0.45]), np.zeros((1, 2)))  # Appendix A: SPS = 1, 0.5, 0.45
    >>> synchronous(survival(np.array([[0.8, 0.9]]), np.array([2])), costs, sure=1.0).tolist()
    [0]
    >>> Curve.of(survival(np.array([[0.8, 0.9]]), np.array([2])), costs, sure=1.0).best
    2
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .verification_cost import Lengths, SlotCosts, Vector

STEPS = 2.0**40  # values closer than 2⁻⁴⁰ are ties
PLACES = 2**20  # more drafts than a step can hold
PRECISE = 1e-4  # relative: an order by a price so close to the best rate loses about its square
ROUNDS = 8  # Dinkelbach converges in two or three


def survival(confidences: Vector, drafted: Lengths) -> Vector:
    """Probability that a draft and all before it are accepted.

    Args:
        confidences: [requests, drafts] probability of each if all before it are; calibrated, in [0, 1].
        drafted: [requests] drafts that there are; the rest survives with 0.
    """
    there = np.arange(confidences.shape[1]) < drafted[:, None]
    return np.cumprod(np.where(there, np.clip(confidences, 0.0, 1.0), 0.0), axis=1)


def synchronous(survived: Vector, costs: SlotCosts, sure: float) -> Lengths:
    """Algorithm 1, with each draft's own cost. Lossless on the confidences of the tokens it decides about.

    Drafts are taken in order of survival less own cost at the rate without drafts, which no token changes.

    Args:
        survived: [requests, drafts], from `survival`.
        sure: tokens that the step yields without drafts: its decodes.

    Returns:
        [requests] how many drafts of each are verified.
    """
    drafts = _Flat.of(survived, costs)
    order = drafts.order(sure / float(costs.base[0]))
    rates = drafts.rates(sure, order)[0]
    falls = np.flatnonzero(rates[1:] <= rates[:-1])
    return _lengths(order[: falls[0]] if len(falls) else order, len(survived))


@dataclass(frozen=True, slots=True)
class Curve:
    """What verifying 0, 1, 2, … drafts is worth, the best first.

    Attributes:
        tokens: [n + 1] expected of the step. seconds: [n + 1] that the round takes, prefill's own aside.
        rates: [n + 1] tokens per second.
        best: the number that is best.
        price: tokens per second at `best`, what a second must bring to be worth it.
    """

    tokens: Vector
    seconds: Vector
    rates: Vector
    best: int
    price: float

    @classmethod
    def of(cls, survived: Vector, costs: SlotCosts, sure: float, guess: float | None = None) -> Curve:
        """The global maximum of Θ. Only for survivals that do not depend on the tokens to be verified.

        Dinkelbach: with the best rate λ known, a draft is worth survival − λ · own, so the best set of any
        size is the first so many by that value; λ is the best rate of such a set, found by iterating.

        Args:
            guess: of λ, such as the price of the step before; saves an iteration.
        """
        drafts = _Flat.of(survived, costs)
        varied = bool(costs.own.any())
        price = guess or sure / float(costs.base[0])
        for _ in range(ROUNDS):
            rates, tokens, seconds = drafts.rates(sure, drafts.order(price))
            best = int(rates.argmax())
            found = float(rates[best])
            settled = abs(found - price) <= PRECISE * price or not varied
            price = found
            if settled:
                break
        return cls(tokens, seconds, rates, best, price)

    def within(self, limit: float, weight: float = 1.0) -> int:
        """The best number for a round that may take `limit` seconds, when a second is worth `weight` × price.

        0 where not even no drafts fit: the decodes run whatever they take.
        """
        value = self.tokens - weight * self.price * self.seconds
        fits = self.seconds <= limit
        return int(np.where(fits, value, -np.inf).argmax()) if fits.any() else 0


def assign(survived: Vector, costs: SlotCosts, slots: int, price: float) -> Lengths:
    """Give so many slots to the drafts that are worth most now, by survival less own cost at `price`.

    Args:
        survived: [requests, drafts] by the confidences of now.
        slots, price: of a `Curve` that the tokens of now are not in.
    """
    return _lengths(_Flat.of(survived, costs).order(price)[:slots], len(survived))


def in_order(values: Vector, places: Lengths) -> Lengths:
    """These places in order of their values, falling; of equal values the lower place first.

    Equal is closer than 2⁻⁴⁰ of the largest, or of 1. The sort is of value and place in one integer: some
    times faster than a stable sort, and the same on every machine.
    """
    scale = max(1.0, -float(values.min(initial=0.0)))  # own costs may outweigh a whole token, survivals not
    keys = places - (values * (STEPS / scale)).astype(np.int64) * PLACES
    keys.sort()
    return keys & (PLACES - 1)


@dataclass(frozen=True, slots=True)
class _Flat:
    """The drafts one after another: place = draft · requests + request, so ties are as they should be.

    Neither survival nor what is left of it after own costs rises along a row, so in order of value a
    request's drafts come in their own order.
    """

    survived: Vector
    own: Vector
    base: Vector
    candidates: Lengths

    @classmethod
    def of(cls, survived: Vector, costs: SlotCosts) -> _Flat:
        flat = survived.T.ravel()
        return cls(flat, costs.own.T.ravel(), costs.base, flat.nonzero()[0])

    def order(self, price: float) -> Lengths:
        """Places of the drafts that may survive, the most worth first."""
        values = self.survived - price * self.own
        if len(self.candidates) < len(values):
            values = values[self.candidates]
        return in_order(values, self.candidates)

    def rates(self, sure: float, order: Lengths) -> tuple[Vector, Vector, Vector]:
        """Rate, tokens and seconds when the first 0, 1, … of `order` are verified."""
        tokens, seconds = np.empty(len(order) + 1), self.base[: len(order) + 1].copy()
        tokens[0] = sure
        np.cumsum(self.survived[order], out=tokens[1:])
        tokens[1:] += sure
        seconds[1:] += np.cumsum(self.own[order])
        return tokens / seconds, tokens, seconds


def _lengths(places: Lengths, requests: int) -> Lengths:
    return np.bincount(places % requests, minlength=requests) if requests else np.zeros(0, np.int64)


def predict(survived: Vector, costs: SlotCosts, sure: float, lengths: Lengths) -> tuple[float, float]:
    """Tokens and seconds of a round that verifies these lengths."""
    chosen = np.arange(survived.shape[1]) < lengths[:, None]
    tokens = sure + float(survived[chosen].sum())
    return tokens, float(costs.base[int(lengths.sum())] + costs.own[chosen].sum())
