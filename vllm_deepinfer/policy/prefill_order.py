"""Which prefill goes first: first come first served, by priority, or the shortest, with ageing.

The default orders by a deadline of each request's own: its arrival plus `stretch` times the time that its
prefill takes alone. A short prompt passes a long one that came up to stretch × (long − short) seconds before
it, and none that came earlier: that is the ageing. A request waits for nothing that arrives after its
deadline, so its bound is the deadline plus the work that had arrived by then, however many keep coming.
A TTFT target is a deadline too: the latest start that still meets it, if that is earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

STRETCH = 8.0


class Order(StrEnum):
    """Policies; `PRIORITY` and `SHORTEST` both let a smaller priority value go first."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    SHORTEST = "shortest"


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request's rank depends on.

    Attributes:
        arrival: seconds on any clock.
        work: seconds that what is left of its prefill takes alone.
        priority: smaller goes first; the same for all where priorities are off.
        resumed: it was generating before it lost its KV: others wait for tokens that it owes already.
        ttft_target: seconds from arrival to its first token, if it asked for one.
    """

    arrival: float
    work: float
    priority: int = 0
    resumed: bool = False
    ttft_target: float | None = None


Rank = tuple[int, bool, float, float]


def rank(claim: Claim, order: Order, stretch: float = STRETCH) -> Rank:
    """Sort key: smaller goes first. It changes only with the claim, never with the time."""
    priority = 0 if order is Order.FCFS else claim.priority
    deadline = claim.arrival
    if order is Order.SHORTEST:
        deadline += stretch * claim.work
    if claim.ttft_target is not None:
        deadline = min(deadline, claim.arrival + claim.ttft_target - claim.work)
    return priority, not claim.resumed, deadline, claim.arrival
