"""What verification did, and how it gets from the engine's process to `/metrics`.

As `scheduler.report` does it: integers under a prefix in the one open table of SchedulerStats.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from vllm_deepinfer.policy.calibration_errors import Errors
from vllm_deepinfer.policy.verification_control import Decision

PREFIX = "deepinfer-verify:"
POSITION = "@"


@dataclass(slots=True)
class VerificationCounts:
    """Since the start.

    Attributes:
        totals: by name: `steps:REASON`, decisions; `budget`, drafts that were chosen; `tokens`, that steps
            with a prediction yielded, and `tokens_predicted`; `us_actual`, `us_predicted` and
            `us_everything`, microseconds that these steps took, were to take, and would have taken for the
            same tokens with everything verified; `refits`, `adopted`, of the calibration; `paused`,
            steps that were not to draft.
        positions: by name and draft: `drafted`, `verified`, `accepted`; `ece_before`, `ece_after`, of the
            survival in parts per million at the last refit.
    """

    totals: dict[str, int] = field(default_factory=dict)
    positions: dict[tuple[str, int], int] = field(default_factory=dict)

    def add(self, name: str, value: float = 1) -> None:
        """Count up."""
        self.totals[name] = self.totals.get(name, 0) + round(value)

    def add_lengths(self, name: str, lengths: Any) -> None:
        """Count lists of these lengths: a list of three has the drafts 0, 1 and 2."""
        for position, count in enumerate(reached(lengths)):
            key = (name, position)
            self.positions[key] = self.positions.get(key, 0) + count

    def decided(self, decision: Decision, drafted: Any) -> None:
        """A step's choice was made."""
        self.add(f"steps:{decision.reason}")
        self.add("budget", int(decision.lengths.sum()))
        self.add_lengths("drafted", drafted)

    def measured(self, decision: Decision, tokens: int, seconds: float) -> None:
        """A step with a prediction has ended."""
        if decision.tokens is None or decision.seconds is None or not decision.gain:
            return
        everything = decision.tokens / decision.seconds / decision.gain  # tokens per second
        self.add("tokens", tokens)
        self.add("tokens_predicted", decision.tokens)
        self.add("us_actual", 1e6 * seconds)
        self.add("us_predicted", 1e6 * decision.seconds)
        self.add("us_everything", 1e6 * tokens / everything)

    def errors(self, name: str, errors: Errors) -> None:
        """The calibration was fitted anew."""
        for position, error in enumerate(errors.survival):
            if errors.counts[position]:
                self.positions[name, position] = round(1e6 * error)

    def put_into(self, stats: Any) -> None:
        """Write it into vLLM's SchedulerStats."""
        table = stats.num_kv_fetch_reqs_by_stage
        for name, value in self.totals.items():
            table[PREFIX + name] = value
        for (name, position), value in self.positions.items():
            table[f"{PREFIX}{name}{POSITION}{position}"] = value

    @classmethod
    def take_from(cls, stats: Any) -> Self | None:
        """Take it out of vLLM's SchedulerStats, which is then as stock vLLM made it. None: there is none."""
        table, found = stats.num_kv_fetch_reqs_by_stage, cls()
        for key in [key for key in table if key.startswith(PREFIX)]:
            name, at, position = key[len(PREFIX) :].partition(POSITION)
            if at:
                found.positions[name, int(position)] = table.pop(key)
            else:
                found.totals[name] = table.pop(key)
        return found if found.totals or found.positions else None


def reached(lengths: Any) -> list[int]:
    """How many of these lists have a draft 0, 1, 2, …"""
    ends = np.bincount(np.asarray(lengths, np.int64))
    counts: list[int] = ends[::-1].cumsum()[::-1][1:].tolist()
    return counts
