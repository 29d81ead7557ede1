"""Confidences for drafters that give none: how often drafts of a position were accepted, so far.

Per request and position, drawn towards what the request's other positions and all other requests say:

    p[r, k] = (accepted + strength · prior[r, k]) / (tried + strength)
    prior[r, k] = sigmoid(logit(global[k]) + how much better or worse than the global this request has done)

Everything fades, so a request that turns from code to prose is noticed. A position counts as tried when it
was verified and all before it were accepted; what was not verified says nothing. Since these numbers are of
the past alone, a choice by them cannot leak a draft's token: `Rule(delay=0)` is lossless with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .calibration import Vector, logit, sigmoid
from .calibration_errors import Lengths

PRIOR = 0.6  # acceptance before anything was seen
STRENGTH = 4.0  # tries that a request's prior is worth
GLOBAL_STRENGTH = 8.0
FADE = 0.97  # per round of a request: the last 33 rounds count
GLOBAL_FADE = 0.999  # per round of any request
CAPACITY = 4_096  # requests remembered; the one that came first goes first


class AcceptanceEstimator:
    """Counts accepted drafts and turns them into confidences."""

    def __init__(self, positions: int, prior: float = PRIOR) -> None:
        if positions < 1 or not 0 < prior < 1:
            raise ValueError(
                f"at least 1 position and a prior inside (0, 1) are needed, got {positions} and {prior}."
            )
        self._rows: dict[str, int] = {}
        self._free = list(range(CAPACITY - 1, -1, -1))
        self._tried = np.zeros((CAPACITY, positions))
        self._accepted = np.zeros((CAPACITY, positions))
        self._all_tried = np.full(positions, GLOBAL_STRENGTH)
        self._all_accepted = np.full(positions, GLOBAL_STRENGTH * prior)

    @property
    def overall(self) -> Vector:
        """[positions] acceptance over all requests."""
        rates: Vector = self._all_accepted / self._all_tried
        return rates

    def confidences(self, keys: Sequence[str]) -> Vector:
        """[requests, positions] probability that a draft is accepted if all before it are."""
        at = np.fromiter((self._rows.get(key, -1) for key in keys), np.int64, len(keys))
        known = (at >= 0)[:, None]
        tried, accepted = self._tried[at] * known, self._accepted[at] * known
        usual = self.overall
        total = tried.sum(axis=1, keepdims=True) + STRENGTH
        shared = STRENGTH * usual[0]
        done = (accepted.sum(axis=1, keepdims=True) + shared) / total
        expected = ((tried * usual).sum(axis=1, keepdims=True) + shared) / total
        prior = sigmoid(logit(usual) + logit(done) - logit(expected))
        estimate: Vector = (accepted + STRENGTH * prior) / (tried + STRENGTH)
        return estimate

    def observe(self, keys: Sequence[str], verified: Lengths, accepted: Lengths) -> None:
        """A step has verified drafts of these requests, each named once; [requests] counts."""
        places = np.arange(self._tried.shape[1])
        news = places < np.minimum(verified, accepted + 1)[:, None]
        good = places < accepted[:, None]
        rows = np.fromiter((self._row(key) for key in keys), np.int64, len(keys))
        fade = np.where(verified > 0, FADE, 1.0)[:, None]
        self._tried[rows] = self._tried[rows] * fade + news
        self._accepted[rows] = self._accepted[rows] * fade + good
        faded = GLOBAL_FADE ** news.sum(axis=0)
        self._all_tried = self._all_tried * faded + news.sum(axis=0)
        self._all_accepted = self._all_accepted * faded + good.sum(axis=0)

    def forget(self, key: str) -> None:
        """The request has ended."""
        row = self._rows.pop(key, None)
        if row is not None:
            self._free.append(row)

    def _row(self, key: str) -> int:
        row = self._rows.get(key)
        if row is None:
            if not self._free:
                self.forget(next(iter(self._rows)))
            row = self._rows[key] = self._free.pop()
            self._tried[row] = self._accepted[row] = 0.0
        return row
