"""Failures on command, so that everything above an engine can be tested against them."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_deepinfer.engine.errors import EngineError


@dataclass(slots=True)
class Faults:
    """What is to go wrong; change it at any time. `SimulatedEngine.crash`, `hang` and `resume` are methods
    there.

    Attributes:
        slowdown: every step takes this many times as long.
        stall_s: seconds added to the next step, once.
        refuse: raised by `submit` as long as it is set.
        fail_requests: number of an accepted request, counted from 1, to the number of tokens after which it
            ends with FinishReason.ERROR.
        fail_start: raised by `start`; the engine is dead then.
        fail_fetches: so many fetches of KV, counted when they end, bring nothing.
        stall_fetches_s: seconds added to every fetch.
    """

    slowdown: float = 1.0
    stall_s: float = 0.0
    refuse: EngineError | None = None
    fail_requests: dict[int, int] = field(default_factory=dict)
    fail_start: EngineError | None = None
    fail_fetches: int = 0
    stall_fetches_s: float = 0.0

    def stretch(self, seconds: float) -> float:
        """Duration of a step under these faults; uses up the stall."""
        stall, self.stall_s = self.stall_s, 0.0
        return seconds * self.slowdown + stall

    def fetch_fails(self) -> bool:
        """Whether the fetch that has just ended was to fail; uses up one."""
        if not self.fail_fetches:
            return False
        self.fail_fetches -= 1
        return True
