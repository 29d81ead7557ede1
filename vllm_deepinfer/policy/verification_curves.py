"""A measured table of what steps take, made to know the context of a batch.

Engines that profile at start-up time steps of so many tokens at one context, and price every batch by that:
with a profile at 8,192 tokens a batch of short chats looks slow whatever is verified, so drafts look cheap. A
second profile at another context gives what a token of context costs, and with it the table of any batch:

    seconds(tokens, contexts) = table(tokens) + slope · (Σ contexts − requests(tokens) · context of the table)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import numpy as np

from .verification_cost import Vector

LEAST = 1e-6  # of an entry, in the table's unit: no step is free


@dataclass(frozen=True, slots=True)
class Profiled:
    """One timed step.

    Attributes:
        tokens, requests: of the step. context: tokens before each request's own.
        time: in any unit, the same for all.
    """

    tokens: int
    requests: int
    context: int
    time: float


def context_slope(steps: Iterable[Profiled]) -> float | None:
    """What a token of context costs: the median over sizes that were timed at two contexts, at least 0.

    None where no size was.
    """
    sizes: dict[int, dict[int, list[Profiled]]] = {}
    for step in steps:
        sizes.setdefault(step.tokens, {}).setdefault(step.context, []).append(step)
    slopes = []
    for contexts in sizes.values():
        near, far = contexts[min(contexts)], contexts[max(contexts)]
        tokens = far[0].requests * (far[0].context - near[0].context)
        if tokens > 0:
            grown = median(step.time for step in far) - median(step.time for step in near)
            slopes.append(grown / tokens)
    return max(median(slopes), 0.0) if slopes else None


@dataclass(frozen=True, slots=True)
class ContextCurve:
    """A table of steps by tokens, and what context adds to it.

    Attributes:
        table: [tokens + 1] of a step at `context`.
        requests: [tokens + 1] that the profile's step of so many tokens had.
        context: tokens before each of those requests' own. slope: of a token of context, ≥ 0.
    """

    table: Vector
    requests: Vector
    context: int
    slope: float

    def at(self, total: float) -> Vector:
        """[tokens + 1] for requests with so many tokens of context in all; it never falls.

        The part of an entry that is context's own differs from entry to entry, as the profile had more
        requests in larger steps: what is left may fall where timing was noisy, and is not believed there.
        """
        bare = self.table - self.slope * self.context * self.requests
        return np.maximum.accumulate(np.maximum(bare, LEAST)) + self.slope * total
