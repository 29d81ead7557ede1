"""A calibration that follows its traffic: refitted from the latest rounds, kept only where it proves better.

The older half of the window fits, the newer half judges: what merely fits noise, or the traffic of before,
is not taken over. Rounds are records of the past, so no refit can look at a draft that is not decided yet.
"""

from __future__ import annotations

import numpy as np

from .calibration import Calibration, Vector
from .calibration_errors import Errors, Lengths, Records, errors
from .calibration_fit import fit

WINDOW = 4_096  # rounds
EVERY = 1_024  # rounds from one refit to the next
STEPS = tuple(float(each) for each in np.geomspace(0.5, 2.0, 13))  # factors that a refit tries


class OnlineCalibration:
    """Holds the calibration that is in use.

    Attributes:
        current: for the drafter's next confidences.
        before, after: errors over the newer half of the window at the last refit, without calibration and
            with `current`; None before the first.
        refits, adopted: how often it was fitted anew, and how often that was taken over.
    """

    def __init__(self, positions: int, known: Calibration | None = None) -> None:
        """
        Args:
            known: from `calibration_fit` or an earlier run, for this very target and drafter.
        """
        self.current = known or Calibration.identity(positions)
        if len(self.current.temperatures) != positions:
            raise ValueError(
                f"the calibration is for {len(self.current.temperatures)} drafts, and {positions} are made."
            )
        self.before: Errors | None = None
        self.after: Errors | None = None
        self.refits = self.adopted = 0
        self._confidences = np.zeros((WINDOW, positions))
        self._verified = np.zeros(WINDOW, np.int64)
        self._accepted = np.zeros(WINDOW, np.int64)
        self._seen = self._since = 0

    def observe(self, confidences: Vector, verified: Lengths, accepted: Lengths) -> bool:
        """Rounds have been verified. Returns whether another calibration is in use now.

        Args:
            confidences: [n, positions] as the drafter gave them, not calibrated.
            verified, accepted: [n] drafts.
        """
        rounds = Records(confidences, verified, accepted).usable()
        rounds = rounds.where(rounds.verified > 0)
        count = min(len(rounds.verified), WINDOW)
        at = (self._seen + np.arange(count)) % WINDOW
        self._confidences[at] = rounds.confidences[-count:] if count else rounds.confidences
        self._verified[at] = rounds.verified[-count:] if count else rounds.verified
        self._accepted[at] = rounds.accepted[-count:] if count else rounds.accepted
        self._seen += count
        self._since += count
        return self._since >= EVERY and self._refit()

    def _refit(self) -> bool:
        self._since = 0
        self.refits += 1
        kept = np.arange(max(self._seen - WINDOW, 0), self._seen) % WINDOW
        older, newer = (self._records(half) for half in np.array_split(kept, 2))
        fitted = fit(older, near=self.current, grid=STEPS).calibration
        self.before = errors(newer.confidences, newer)
        present = errors(self.current.apply(newer.confidences), newer)
        found = errors(fitted.apply(newer.confidences), newer)
        changed = found.mean_survival < min(present.mean_survival, self.before.mean_survival)
        if not changed and self.before.mean_survival < present.mean_survival:
            fitted, found, changed = Calibration.identity(newer.confidences.shape[1]), self.before, True
        self.current, self.after = (fitted, found) if changed else (self.current, present)
        self.adopted += changed
        return changed

    def _records(self, rows: Lengths) -> Records:
        return Records(self._confidences[rows], self._verified[rows], self._accepted[rows])
