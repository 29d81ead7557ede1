"""Cut prefill chunks so that a step takes what it may: decodes first, then prefills in the order given.

Guarantees, for every cost model that is monotone (`StepCost` is):
(a) The predicted step time is at most the budget in every step whose decodes leave room for one smallest
    chunk, one tile. Where they leave less, in all but every `patience`-th step, which is over by that chunk.
(b) The first prefill in the order gets at least one chunk in every `patience` steps, however many decodes
    never end. So n tokens at the front need at most patience · ⌈n / tile⌉ steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .step_cost import Features, StepCost, Work

PATIENCE = 8  # steps


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt, or what is left of it.

    Attributes:
        key: names it in the plan.
        context: tokens before, computed or found in the prefix cache, x.
        remaining: tokens to compute, > 0.
    """

    key: str
    context: int
    remaining: int


class StepBudget:
    """What one step may still take. Chunks are charged one after another.

    Attributes:
        used: features of everything that is in the step so far.
        tokens_left: prefill tokens that the step may still hold, whatever they cost.
    """

    def __init__(self, cost: StepCost, decodes: Features, limit: float, tokens_left: int) -> None:
        """
        Args:
            cost: predicts the step.
            decodes: features of the requests that decode; they are in the step whatever they cost.
            limit: seconds that the step may be predicted to take; infinite: only the token cap counts.
            tokens_left: hard cap on its prefill tokens.
        """
        self.used = decodes
        self.tokens_left = tokens_left
        self._cost = cost
        self._limit = limit
        self._apart = self._apart_from_tokens()

    @property
    def predicted(self) -> float:
        """Seconds that the step takes as it stands."""
        return self._cost.seconds(self.used)

    def chunk(self, context: int, wanted: int) -> int:
        """The largest chunk after `context` that fits: all of `wanted`, or up to the end of a tile.

        All rows of a step share its tiles, and its graph size on a GPU: a chunk beside 4 decodes and 100
        other tokens ends where 104 + n is a multiple. 0: not even the smallest fits.
        """
        wanted = min(wanted, self.tokens_left)
        if wanted <= 0:
            return 0
        if self.fits(context, wanted):
            return wanted
        tile = self._cost.tile
        rows = int(self.used.tokens + self.used.decodes)
        first = tile - rows % tile  # tokens up to the end of the tile that is begun
        low, high = 0, (wanted - first) // tile + 1  # numbers of tile ends that fit, that may not
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits(context, first + (middle - 1) * tile):
                low = middle
            else:
                high = middle - 1
        return first + (low - 1) * tile if low else 0

    def fits(self, context: int, tokens: int) -> bool:
        """Whether the step with this chunk is predicted to take no longer than its limit.

        Called some ten times per prefill and step: the sum is `StepCost.seconds`, without its objects.
        """
        cost = self._cost
        tiles = -((self.used.tokens + tokens) // -cost.tile)
        return (
            self._apart
            + cost.per_token * tiles * cost.tile
            + cost.per_pair * cost.attention.attended(tokens, context)
            + cost.per_prefill_context * cost.attention.scanned(context)
        ) <= self._limit

    def worthwhile(self, context: int, tokens: int) -> bool:
        """Whether computing the chunk costs at least as much as reading its context once more.

        Below that it is cheaper to leave the chunk to a step of its own: the context is read per chunk.
        """
        cost = self._cost
        computing = cost.per_token * tokens + cost.per_pair * cost.attention.attended(tokens, context)
        return computing >= cost.per_prefill_context * cost.attention.scanned(context)

    def charge(self, context: int, tokens: int) -> None:
        """Put a chunk into the step."""
        self.used = self.used + self._cost.features(Work(context, prefill_tokens=tokens))
        self.tokens_left -= tokens
        self._apart = self._apart_from_tokens()

    def _apart_from_tokens(self) -> float:
        """Seconds of what is in the step, except the dense work, which is counted in whole tiles."""
        cost, used = self._cost, self.used
        return (
            cost.per_step
            + cost.per_pair * used.attended
            + cost.per_decode * used.decodes
            + cost.per_decode_context * used.decode_context
            + cost.per_prefill_context * used.prefill_context
        )


TRIES = 4  # prefills that may turn out not to fit before the step is taken as it is


def plan(budget: StepBudget, prefills: Iterable[Prefill], smallest: int = 0) -> dict[str, int]:
    """Give the budget to the prefills in their order, and charge it.

    Ends with the first that is cut. One that does not fit at all, because its context alone takes too long to
    read, does not keep those behind it from what is left.

    Args:
        budget: of this step; charged with what is given.
        prefills: in order of who goes first.
        smallest: tokens that the first gets even if nothing fits; 0 in an ordinary step.

    Returns:
        key to chunk, for those that get one, in order.
    """
    chunks: dict[str, int] = {}
    refused = 0
    for prefill in prefills:
        chunk = budget.chunk(prefill.context, prefill.remaining)
        if not chunk:
            chunk = min(smallest, prefill.remaining, budget.tokens_left)
        smallest = 0
        whole = chunk == prefill.remaining
        if chunk and (whole or not chunks or budget.worthwhile(prefill.context, chunk)):
            budget.charge(prefill.context, chunk)
            chunks[prefill.key] = chunk
            if not whole:
                break
        else:
            refused += 1
        if refused == TRIES or budget.tokens_left <= 0:
            break
    return chunks


class Patience:
    """Counts the steps in a row that gave the first prefill nothing: guarantee (b).

    Attributes:
        forced: steps that were made to hold a chunk.
    """

    def __init__(self, steps: int = PATIENCE) -> None:
        if steps < 1:
            raise ValueError(f"patience must be at least 1 step, got {steps}.")
        self._steps = steps
        self._stalled = 0
        self.forced = 0

    @property
    def exhausted(self) -> bool:
        """Whether this step must hold a chunk whatever it costs."""
        return self._stalled >= self._steps - 1

    @property
    def stalled(self) -> int:
        """Steps in a row, up to now, that gave the first prefill nothing."""
        return self._stalled

    def note(self, waiting: bool, progressed: bool, over: bool) -> None:
        """A step was put together.

        Args:
            waiting: there was a prefill. progressed: the first of them got a chunk.
            over: the step holds a chunk that its budget had no room for.
        """
        self._stalled = self._stalled + 1 if waiting and not progressed else 0
        self.forced += over
