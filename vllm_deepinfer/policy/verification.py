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
from numpy.typing import NDArray

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
    order = in_order(survived - sure / costs.base[0] * costs.own, survived > 0)
    rates = _rates(survived, costs, sure, order)[0]
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
        there, varied = survived > 0, bool(costs.own.any())
        price = guess or sure / float(costs.base[0])
        for _ in range(ROUNDS):
            order = in_order(survived - price * costs.own, there)
            rates, tokens, seconds = _rates(survived, costs, sure, order)
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
    return _lengths(in_order(survived - price * costs.own, survived > 0)[:slots], len(survived))


def in_order(values: Vector, there: NDArray[np.bool_]) -> Lengths:
    """Places of the drafts in order of value, falling; place = draft · requests + request.

    Values must not rise along a row, so a request's drafts come in their own order. The sort is of value and
    place in one integer: some times faster than a stable sort, and the same on every machine.
    """
    steps = np.floor(np.clip(values, -1.0, 1.0) * STEPS).astype(np.int64).T.ravel()
    places = np.arange(len(steps))
    keys = (places - steps * PLACES)[there.T.ravel()]
    keys.sort()
    return keys & (PLACES - 1)


def _rates(survived: Vector, costs: SlotCosts, sure: float, order: Lengths) -> tuple[Vector, Vector, Vector]:
    """Rate, tokens and seconds when the first 0, 1, … of `order` are verified."""
    count = len(order)
    tokens, seconds = np.empty(count + 1), costs.base[: count + 1].copy()
    tokens[0] = sure
    np.cumsum(survived.T.ravel()[order], out=tokens[1:])
    tokens[1:] += sure
    seconds[1:] += np.cumsum(costs.own.T.ravel()[order])
    return tokens / seconds, tokens, seconds


def _lengths(places: Lengths, requests: int) -> Lengths:
    return np.bincount(places % requests, minlength=requests) if requests else np.zeros(0, np.int64)


def predict(survived: Vector, costs: SlotCosts, sure: float, lengths: Lengths) -> tuple[float, float]:
    """Tokens and seconds of a round that verifies these lengths."""
    chosen = np.arange(survived.shape[1]) < lengths[:, None]
    tokens = sure + float(survived[chosen].sum())
    return tokens, float(costs.base[int(lengths.sum())] + costs.own[chosen].sum())
