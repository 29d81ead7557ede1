"""Random choices that keep to one side of the split, and remember what they chose."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from .split import Split, side_of

T = TypeVar("T")


@dataclass(frozen=True)
class Templates:
    """Wordings of one question; those held out are never seen in training."""

    train: tuple[str, ...]
    heldout: tuple[str, ...]

    def on(self, split: Split) -> tuple[str, ...]:
        """Those of one side."""
        return self.train if split == "train" else self.heldout


_POLITE = (
    "{C}.",
    "{C}",
    "{c}",
    "{c}.",
    "Please {c}.",
    "please {c}",
    "{C}, please.",
    "{C} now.",
    "Please {c} now.",
    "Can you {c}?",
    "Can you please {c}?",
    "Could you {c}?",
    "Could you please {c}?",
    "Would you {c}, please?",
    "I want you to {c}.",
    "I want to {c}.",
    "I need to {c}.",
    "I would like to {c}.",
    "Now {c}.",
    "OK, {c}.",
    "Hi, {c}.",
    "{C} for me.",
    "Let us {c}.",
    "You should {c}.",
)
"""Ways to ask for what a command says."""


def commands(bare: Sequence[str], others: Sequence[str], heldout: Sequence[str]) -> Templates:
    """Every way to ask for the commands, and other wordings; what is held out is left out.

    Args:
        bare: Commands without a capital and a full stop, as "find {}".
    """
    asked = (
        way.replace("{C}", one[0].upper() + one[1:]).replace("{c}", one) for one in bare for way in _POLITE
    )
    kept = dict.fromkeys(wording for wording in (*others, *asked) if wording not in heldout)
    return Templates(tuple(kept), tuple(heldout))


class Draw:
    """A source of choices for one side.

    Attributes:
        templates: every wording that was taken.
        values: every value that was taken, as "kind:value".
    """

    def __init__(self, rng: random.Random, split: Split) -> None:
        self.rng = rng
        self.split = split
        self.templates: set[str] = set()
        self.values: set[str] = set()

    def template(self, templates: Templates) -> str:
        """A wording of this side."""
        chosen = self.rng.choice(templates.on(self.split))
        self.templates.add(chosen)
        return chosen

    def of(self, pool: Sequence[T]) -> T:
        """One of a pool that is not split: a key, a name of a field, a fact."""
        return self.rng.choice(pool)

    def value(self, kind: str, pool: Sequence[str]) -> str:
        """One of the pool's values that are on this side."""
        chosen = self.rng.choice(_on_side(kind, tuple(pool), self.split))
        self.values.add(f"{kind}:{chosen}")
        return chosen

    def made(self, kind: str, make: Callable[[], str]) -> str:
        """What ``make`` gives, made again until it is on this side."""
        while side_of(f"{kind}:{(text := make())}") != self.split:
            pass
        self.values.add(f"{kind}:{text}")
        return text

    def number(self, kind: str, low: int, high: int) -> int:
        """A whole number of this side from ``low`` to ``high``, both included."""
        return int(self.made(kind, lambda: str(self.rng.randint(low, high))))

    def chance(self, probability: float) -> bool:
        """True in that share of calls."""
        return self.rng.random() < probability


@cache
def _on_side(kind: str, pool: tuple[str, ...], split: Split) -> tuple[str, ...]:
    chosen = tuple(value for value in pool if side_of(f"{kind}:{value}") == split)
    if not chosen:
        raise ValueError(f"no value of {kind} is on the side {split}: give the pool more values")
    return chosen
