"""Which measured steps a fit looks at: the latest few of every shape, so that no shape crowds out another.

An hour of short prompts would otherwise push every long context out of a plain window, and the first long
prompt after it would be cut by a model that has forgotten what a context costs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import log2

from .step_cost import Features

PER_SHAPE = 12  # samples kept of one shape
SHAPES = 64  # shapes kept; the one that was seen longest ago goes first

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured step.

    Attributes:
        features: what it computed.
        seconds: how long it took, > 0.
        number: how many steps had been measured before it.
    """

    features: Features
    seconds: float
    number: int


class Samples:
    """A bounded collection of samples: at most `PER_SHAPE` of each of `SHAPES` shapes."""

    def __init__(self) -> None:
        self._shapes: dict[Shape, deque[Sample]] = {}
        self.seen = 0

    def add(self, features: Features, seconds: float) -> Sample:
        """Keep a step; the oldest of its shape goes."""
        sample = Sample(features, seconds, self.seen)
        self.seen += 1
        shape = shape_of(features)
        kept = self._shapes.pop(shape, None)  # back in at the end: the dict is in order of last use
        if kept is None:
            kept = deque(maxlen=PER_SHAPE)
            if len(self._shapes) == SHAPES:
                del self._shapes[next(iter(self._shapes))]
        kept.append(sample)
        self._shapes[shape] = kept
        return sample

    def all(self) -> list[Sample]:
        """Every sample that is kept, in no particular order."""
        return [sample for kept in self._shapes.values() for sample in kept]

    def chunk_shapes(self) -> int:
        """How many different sizes of prefill are among them: fewer than three give no slope."""
        return len({shape[0] for shape in self._shapes if shape[0]})


def shape_of(features: Features) -> Shape:
    """Powers of two of what a step computed; contexts below 256 tokens count as none."""
    return (
        _power(features.tokens),
        _power(features.prefill_context / 256),
        _power(features.decodes),
        _power(features.decode_context / 1024),
    )


def _power(value: float) -> int:
    return int(log2(value)) + 1 if value >= 1 else 0
