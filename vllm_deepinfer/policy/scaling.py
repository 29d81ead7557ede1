"""How many replicas a pool should have.

Prefill follows the time that its queue takes, decode the use of its KV and its inter-token latency: they are
short of different things, which is why they are separate pools. A need has to last, and to miss its target by
more than the hysteresis, before anything happens; growing is quicker than shrinking.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

GROW_AT_MOST = 2.0
"""Factor by which a latency alone may grow a pool at once: it does not say how far from the target it is."""


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """Targets and delays. None: that measure does not count.

    Attributes:
        least, most: bounds of the number of replicas.
        target_queue_s: predicted seconds that a new request waits for its prefill.
        target_kv_use: share of the KV capacity in use.
        target_itl_ms: inter-token latency.
        hysteresis: share of a target by which it must be missed.
        up_after_s, down_after_s: how long the need must last.
        zero_after_s: without a request, with ``least`` 0; None: never below 1.
    """

    least: int
    most: int
    target_queue_s: float | None = None
    target_kv_use: float | None = None
    target_itl_ms: float | None = None
    hysteresis: float = 0.1
    up_after_s: float = 10.0
    down_after_s: float = 120.0
    zero_after_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or self.most < 1:
            raise ValueError(f"replicas must be 0 ≤ least ≤ most, got {self.least} and {self.most}.")
        if self.target_queue_s is self.target_kv_use is self.target_itl_ms is None:
            raise ValueError("a pool that scales needs a target: queue_s, kv_use or itl_ms.")


@dataclass(frozen=True, slots=True)
class ReplicaMeasure:
    """One replica, averaged over the look-back.

    Attributes:
        queue_s: predicted seconds of prefill that it holds.
        kv_use: share of its KV that is in use.
        itl_ms: its inter-token latency; 0 without decodes.
        active: requests.
    """

    queue_s: float = 0.0
    kv_use: float = 0.0
    itl_ms: float = 0.0
    active: float = 0.0


@dataclass(frozen=True, slots=True)
class ScalingState:
    """What has lasted since when, in seconds of the caller's clock; None: it does not hold now."""

    up_since: float | None = None
    down_since: float | None = None
    idle_since: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """How many replicas, why, and what to remember."""

    replicas: int
    reason: str
    state: ScalingState


@dataclass(frozen=True, slots=True)
class Need:
    """Replicas that one measure asks for, as a real number, and in words why."""

    replicas: float
    reason: str


def needs(settings: ScalingSettings, measures: Sequence[ReplicaMeasure]) -> list[Need]:
    """What each targeted measure asks for, at the target exactly."""
    count = len(measures)
    found = []
    if settings.target_queue_s is not None:
        total = sum(one.queue_s for one in measures)
        found.append(
            Need(
                total / settings.target_queue_s,
                f"queue {total / max(count, 1):.2f} s of {settings.target_queue_s:g} s",
            )
        )
    if settings.target_kv_use is not None:
        total = sum(one.kv_use for one in measures)
        found.append(
            Need(
                total / settings.target_kv_use,
                f"KV use {total / max(count, 1):.0%} of {settings.target_kv_use:.0%}",
            )
        )
    latencies = [one.itl_ms for one in measures if one.itl_ms > 0]
    if settings.target_itl_ms is not None and latencies:
        worst = max(latencies)
        factor = min(worst / settings.target_itl_ms, GROW_AT_MOST)
        found.append(Need(count * factor, f"ITL {worst:.0f} ms of {settings.target_itl_ms:g} ms"))
    return found


def decide(
    settings: ScalingSettings,
    state: ScalingState,
    now: float,
    current: int,
    measures: Sequence[ReplicaMeasure],
    waiting: float,
) -> Decision:
    """The number of replicas from now on.

    Args:
        current: replicas that there are or that are being started.
        measures: of the replicas that run.
        waiting: requests that no replica has taken yet.
    """
    if current == 0:
        wanted = max(settings.least, 1 if waiting > 0 else 0)
        return Decision(wanted, "requests wait" if wanted and waiting else "idle", ScalingState())
    asked = needs(settings, measures)
    most = max(asked, key=lambda one: one.replicas, default=Need(0.0, "no load"))
    idle = waiting == 0 and all(one.active == 0 for one in measures)
    idle_since = (state.idle_since if state.idle_since is not None else now) if idle else None
    if (
        idle_since is not None
        and settings.least == 0
        and settings.zero_after_s is not None
        and now - idle_since >= settings.zero_after_s
    ):
        return Decision(0, f"idle for {now - idle_since:.0f} s", ScalingState())
    floor = max(settings.least, 1)

    def within(replicas: float) -> int:
        return min(max(_count(replicas), floor), settings.most)

    up = within(most.replicas / (1 + settings.hysteresis))
    if up > current:  # beyond the hysteresis: now to the target itself
        up = within(most.replicas)
    down = within(most.replicas / (1 - settings.hysteresis))
    since = ScalingState(
        up_since=(state.up_since if state.up_since is not None else now) if up > current else None,
        down_since=(state.down_since if state.down_since is not None else now) if down < current else None,
        idle_since=idle_since,
    )
    if since.up_since is not None and now - since.up_since >= settings.up_after_s:
        return Decision(up, most.reason, replace(since, up_since=None))
    if since.down_since is not None and now - since.down_since >= settings.down_after_s:
        return Decision(down, most.reason, replace(since, down_since=None))
    held = min(max(current, floor), settings.most)
    return Decision(held, "out of bounds" if held != current else most.reason, since)


def _count(replicas: float) -> int:
    """Whole replicas; a rounding error is no reason for one more."""
    return math.ceil(replicas - 1e-9)
