"""What a verifier remembers from step to step: confidences until they are old enough, and what to try."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from .verification import Curve
from .verification_cost import Lengths, Vector

UNSEEN = 0.5  # confidence of a position that no request has been drafted at yet
NEWS = 0.1  # weight of one more step in the mean that stands in for requests without history


class Delayed:
    """Confidences as they were some steps ago, for the requests of now.

    A request that was not there then gets the mean of those that were, position by position.
    """

    def __init__(self, delay: int) -> None:
        """
        Args:
            delay: steps; 0: those that were just pushed.
        """
        if delay < 0:
            raise ValueError(f"confidences are delayed by at least 0 steps, got {delay}.")
        self._steps: deque[tuple[dict[str, int], Vector]] = deque(maxlen=delay + 1)
        self._mean: Vector | None = None

    def push(self, keys: Sequence[str], confidences: Vector) -> None:
        """A step's confidences: [requests, drafts], NaN where nothing was drafted."""
        if self._steps and self._steps[-1][1].shape[1] != confidences.shape[1]:
            self._steps.clear()
            self._mean = None
        self._steps.append((dict(zip(keys, range(len(keys)), strict=True)), confidences))
        if len(self._steps) == self._steps.maxlen:
            self._note(self._steps[0][1])

    def of(self, keys: Sequence[str]) -> Vector | None:
        """[requests, drafts] for these requests; None while no step is old enough."""
        if len(self._steps) < (self._steps.maxlen or 0) or self._mean is None:
            return None
        rows, old = self._steps[0]
        if not len(old):
            return np.repeat(self._mean[None], len(keys), axis=0)
        at = np.array([rows.get(key, -1) for key in keys], np.int64)
        found = old[at]
        found[at < 0] = np.nan
        return np.where(np.isnan(found), self._mean, found)

    def _note(self, confidences: Vector) -> None:
        seen = ~np.isnan(confidences)
        count = seen.sum(axis=0)
        total = np.where(seen, confidences, 0.0).sum(axis=0)
        if self._mean is None:
            self._mean = np.where(count > 0, total / np.maximum(count, 1), UNSEEN)
        else:
            news = np.where(count > 0, total / np.maximum(count, 1), self._mean)
            self._mean = (1 - NEWS) * self._mean + NEWS * news


class Exploration:
    """Now and then another number of drafts than the best, so that costs and acceptances stay known.

    Uniform lengths take turns. What a try is predicted to lose is saved up first from a share of the time, so
    all tries together lose no more than that share; and at most every so many steps there is one.
    """

    def __init__(self, share: float, every: int) -> None:
        if not 0 <= share < 1 or every < 1:
            raise ValueError(
                f"exploration takes a share in [0, 1) and at most every step, got {share} and {every}."
            )
        self._share, self._every = share, every
        self._credit = 0.0  # seconds
        self._since = self._level = 0

    def slots(self, chosen: int, curve: Curve, drafted: Lengths, limit: float) -> int | None:
        """The number to try in this step instead of `chosen`; None: no try."""
        if not self._share:
            return None
        earned = self._credit + self._share * float(curve.seconds[chosen])
        self._credit = min(earned, float(curve.seconds.max()))
        self._since += 1
        if self._since < self._every:
            return None
        tried = min(int(np.minimum(drafted, self._level).sum()), len(curve.tokens) - 1)
        seconds = float(curve.seconds[tried])
        if tried == chosen or seconds > limit:
            self._next(drafted)
            return None
        loss = max(seconds * (1 - float(curve.rates[tried]) / curve.price), 0.0)
        if loss > self._credit:
            return None
        self._credit -= loss
        self._since = 0
        self._next(drafted)
        return tried

    def _next(self, drafted: Lengths) -> None:
        self._level = (self._level + 1) % (int(drafted.max()) + 1)
