"""Times to first token at saturation: does admission keep them near those of an unloaded door?"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from vllm_deepinfer.bench.gateway.doors import Door, Workshop, quantile, read_sample

MAX_BUSY = 0.6
UNLOADED_STREAMS = 16
OFFERED_STREAMS = 500
TOKENS = 8  # short answers: the door is the first to be full, not the clients that share the other core


@dataclass(frozen=True)
class Saturation:
    """p99 of the client's time to first token without and with far more streams than the door can carry."""

    unloaded_ms: float
    saturated_ms: float
    tokens_per_s: float  # at saturation
    refusals_per_s: float


def measure(workshop: Workshop, door: Door, seconds: float) -> Saturation:
    """One round."""
    unloaded, _, _ = _probe(workshop, door, UNLOADED_STREAMS, seconds, settle_s=1.5, spread_s=0.5)
    saturated, tokens, refused = _probe(workshop, door, OFFERED_STREAMS, seconds, settle_s=4.0, spread_s=2.0)
    return Saturation(unloaded, saturated, tokens, refused)


def _probe(
    workshop: Workshop, door: Door, streams: int, seconds: float, *, settle_s: float, spread_s: float
) -> tuple[float, float, float]:
    """p99 time to first token in ms of the answers that began, tokens per second, refusals per second."""
    with workshop.load(door, streams, TOKENS, "load", spread_s) as load:
        time.sleep(spread_s + settle_s)
        load.ask("first")
        before, began = read_sample(load), time.monotonic()
        time.sleep(seconds)
        after, took = read_sample(load), time.monotonic() - began
        first = json.loads(load.ask("first"))
    times = sorted(1000 * (got - sent) for _, sent, got in first)
    if not times:
        raise RuntimeError("no answer began while it was measured: the door admitted nothing")
    events, refused = (after[key] - before[key] for key in ("events", "refused"))
    return quantile(times, 0.99), events / took, refused / took
