"""Where the time of a measurement goes, by torch.profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .workload import Measurement, Timed

TOP = 15


def profiled(measure: Callable[[Timed], Measurement]) -> dict[str, Any]:
    """Run one measurement under the profiler and say which operators its timed part spends its time in.

    Returns the seconds of the timed part, and `operators`: the 15 with the largest own time (without that of
    operators they call), then `other operators`, then `outside operators` (Python, scheduler, sampling).
    Shares are of the timed part. The profiler itself slows small operators: read the shares, not the seconds.
    """
    from torch.profiler import ProfilerActivity, profile

    with_profiler = profile(activities=[ProfilerActivity.CPU])
    seconds = measure(with_profiler).seconds
    events = [(e.key, e.self_cpu_time_total / 1e6, e.count) for e in with_profiler.key_averages()]
    return {"seconds": round(seconds, 4), "operators": table(events, seconds)}


def table(events: Iterable[tuple[str, float, int]], seconds: float, top: int = TOP) -> list[dict[str, Any]]:
    """Rows of operator, own milliseconds, share and calls, from (name, own seconds, calls)."""
    ranked = sorted(events, key=lambda event: -event[1])
    rest = ranked[top:]
    inside = sum(own for _, own, _ in ranked)
    rows = [
        *ranked[:top],
        ("other operators", sum(own for _, own, _ in rest), sum(calls for *_, calls in rest)),
        ("outside operators", max(0.0, seconds - inside), 0),
    ]
    return [
        {"operator": name, "ms": round(own * 1e3, 3), "share": round(own / seconds, 4), "calls": calls}
        for name, own, calls in rows
    ]
