"""Sequential Temperature Scaling: draft confidences that mean what they say.

    calibrated c_k = sigmoid(logit(c_k) / T_k)        one T per position; order is kept, 1 changes nothing

A calibration belongs to one target and one drafter. `calibration_fit` finds the temperatures,
`calibration_online` keeps them right.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

FORMAT = 1
EDGE = 1e-6  # confidences are kept this far from 0 and 1, where a logit is infinite


class ForeignCalibration(ValueError):
    """A saved calibration that must not be used here; the message says why, as a sentence."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A temperature per position, each finite and > 0."""

    temperatures: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.temperatures or any(not 0 < each < math.inf for each in self.temperatures):
            raise ValueError(f"temperatures are one or more finite numbers > 0, got {self.temperatures}.")

    @classmethod
    def identity(cls, positions: int) -> Calibration:
        """Leaves confidences as they are."""
        return cls((1.0,) * positions)

    def apply(self, confidences: Vector) -> Vector:
        """Calibrated confidences, [requests, positions]; what is not a number stays so."""
        if confidences.shape[1] != len(self.temperatures):
            raise ValueError(
                f"this calibration is for {len(self.temperatures)} positions, got {confidences.shape[1]}."
            )
        calibrated: Vector = sigmoid(logit(confidences) / np.array(self.temperatures))
        return calibrated


def logit(confidences: Vector) -> Vector:
    """log(c / (1 − c)), finite for every c in [0, 1]."""
    inside = np.clip(confidences, EDGE, 1 - EDGE)
    odds: Vector = np.log(inside) - np.log1p(-inside)
    return odds


def sigmoid(logits: Vector) -> Vector:
    """1 / (1 + e^−x), without overflow."""
    return 0.5 + 0.5 * np.tanh(0.5 * logits)


def dumps(calibration: Calibration, target: str, drafter: str) -> str:
    """As JSON text, for one target and one drafter: names that tell checkpoints apart, such as digests."""
    content = {
        "format": FORMAT,
        "target": target,
        "drafter": drafter,
        "temperatures": list(calibration.temperatures),
    }
    return json.dumps(content, indent=2) + "\n"


def loads(text: str, target: str, drafter: str) -> Calibration:
    """Read what `dumps` wrote.

    Raises:
        ForeignCalibration: It is damaged, or of another target, drafter or format.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ForeignCalibration(f"The calibration is not JSON ({error}): fit it anew.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ForeignCalibration(f"The calibration is not of format {FORMAT}: fit it anew.")
    for name, here in (("target", target), ("drafter", drafter)):
        if content.get(name) != here:
            raise ForeignCalibration(
                f"The calibration was fitted for {name} {content.get(name)!r}, and this is {here!r}: "
                f"fit one for this pair."
            )
    found = content.get("temperatures")
    if not isinstance(found, list) or any(type(each) not in (int, float) for each in found):
        raise ForeignCalibration("The calibration's temperatures are not a list of numbers: fit it anew.")
    try:
        return Calibration(tuple(float(each) for each in found))
    except (ValueError, OverflowError) as error:
        raise ForeignCalibration(f"The calibration cannot be used, since {error}") from error
