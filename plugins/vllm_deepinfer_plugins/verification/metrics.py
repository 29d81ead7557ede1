"""`deepinfer_verification_*` series in `/metrics`, from what comes with each step's SchedulerStats."""

from __future__ import annotations

from functools import cache
from typing import Any

from prometheus_client import Counter, Gauge

from .counts import VerificationCounts

STEPS = "steps:"
TOTALS = {
    "budget": ("drafts_chosen", "Drafts that were chosen to be verified.", 1.0),
    "tokens": ("tokens", "Tokens of steps with a prediction and without prefill.", 1.0),
    "tokens_predicted": ("tokens_predicted", "Tokens that those steps were predicted to yield.", 1.0),
    "us_actual": ("seconds", "Duration of those steps.", 1e-6),
    "us_predicted": ("seconds_predicted", "Their predicted duration.", 1e-6),
    "us_everything": (
        "seconds_verifying_everything",
        "What the same tokens were predicted to take with every draft verified: over seconds, the gain.",
        1e-6,
    ),
    "paused": ("steps_without_drafting", "Steps whose scheduler did without drafts.", 1.0),
    "refits": ("calibration_refits", "Fits of the confidences' calibration.", 1.0),
    "adopted": ("calibration_adoptions", "Fits that replaced the calibration in use.", 1.0),
}
POSITIONS = {
    "drafted": "Drafts made, by their place.",
    "verified": "Drafts verified, by their place.",
    "accepted": "Drafts accepted, by their place.",
}
ERRORS = {
    "ece_before": "Calibration error of survival without calibration, at the last refit.",
    "ece_after": "Calibration error of survival with the calibration in use, at the last refit.",
}


def _name(name: str) -> str:
    return f"deepinfer_verification_{name}"


@cache
def counters() -> dict[str, Counter]:
    """One set per process: prometheus_client refuses to register a name twice."""
    found = {key: Counter(_name(name), text, ["engine"]) for key, (name, text, _) in TOTALS.items()}
    for name, text in POSITIONS.items():
        found[name] = Counter(_name(name), text, ["engine", "position"])
    text = "Choices by where they came from; no_history, no_cost and not_a_number verify everything."
    return {**found, STEPS: Counter(_name("steps"), text, ["engine", "reason"])}


@cache
def gauges() -> dict[str, Gauge]:
    """The calibration's errors; one set per process."""
    labels = ["engine", "position"]
    return {
        name: Gauge(_name(name), text, labels, multiprocess_mode="mostrecent")
        for name, text in ERRORS.items()
    }


class VerificationCounter:
    """Turns totals into increments.

    Args:
        engine: Value of the label.
    """

    def __init__(self, engine: str) -> None:
        self._engine, self._before = engine, VerificationCounts()

    def record(self, stats: Any) -> None:
        """Count what one step's SchedulerStats carry, and take it out of them."""
        counts = VerificationCounts.take_from(stats)
        if counts is None:
            return
        for name, value in counts.totals.items():
            grown = max(value - self._before.totals.get(name, 0), 0)
            if name.startswith(STEPS):
                counters()[STEPS].labels(self._engine, name.removeprefix(STEPS)).inc(grown)
            else:
                counters()[name].labels(self._engine).inc(grown * TOTALS[name][2])
        for (name, position), value in counts.positions.items():
            if name in ERRORS:
                gauges()[name].labels(self._engine, str(position)).set(value / 1e6)
            else:
                grown = max(value - self._before.positions.get((name, position), 0), 0)
                counters()[name].labels(self._engine, str(position)).inc(grown)
        self._before = counts
