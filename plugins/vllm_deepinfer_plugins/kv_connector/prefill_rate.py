"""How fast this engine prefills, to say what a hit has saved."""

from __future__ import annotations

_MIN_TOKENS = 64
_WEIGHT = 0.1


class PrefillRate:
    """Tokens per second of steps that are mostly prefill, as a moving average of step to step times.

    An estimate, for a metric: a long context costs more per token than this says.
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._seconds_per_token = 0.0

    def step(self, tokens: int, now: float) -> None:
        """A step of that many tokens begins at `now` seconds."""
        if self._last is not None:
            before, began = self._last
            if before >= _MIN_TOKENS and now > began:
                sample = (now - began) / before
                old = self._seconds_per_token
                self._seconds_per_token = sample if not old else old + _WEIGHT * (sample - old)
        self._last = (tokens, now)

    def seconds(self, tokens: int) -> float:
        """Time that this many tokens would have taken; 0 before anything was measured."""
        return tokens * self._seconds_per_token
