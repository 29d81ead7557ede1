"""Losses in the plain form: of texts, behind a hit, and behind a prompt whose decoder half was cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp, log

import torch
from torch.nn import functional as F

from ...model import quant
from ...model.backbone import Backbone
from ...replay.sizes import Sizes
from .replayed import Cut, replayed
from .texts import Text

BLOCK = 32
"""Hits end at a multiple of it, as with the laptop's recipe."""


@dataclass(frozen=True)
class Loss:
    """Attributes:
    nats: summed over ``tokens`` tokens that stand for ``characters`` characters.
    """

    nats: float
    tokens: int
    characters: int = 0

    @property
    def bits_per_token(self) -> float:
        """Cross-entropy in bits."""
        return self.nats / self.tokens / log(2)

    @property
    def bits_per_character(self) -> float:
        """The same per character, which does not depend on the vocabulary."""
        return self.nats / self.characters / log(2)

    @property
    def perplexity(self) -> float:
        """exp of the mean loss."""
        return exp(self.nats / self.tokens)

    def __add__(self, other: Loss) -> Loss:
        return Loss(self.nats + other.nats, self.tokens + other.tokens, self.characters + other.characters)


NOTHING = Loss(0.0, 0)


def loss_of(model: Backbone, texts: Sequence[Text]) -> Loss:
    """The loss of all tokens that count."""
    total = NOTHING
    for text in texts:
        ids = torch.tensor(text.ids)
        with torch.no_grad():
            logits = model.whole(ids.unsqueeze(0))[0]
        learnt = torch.tensor(text.learnt[1:])
        nats = F.cross_entropy(logits[:-1].float(), ids[1:], reduction="none")[learnt]
        total += Loss(float(nats.sum(dtype=torch.float64)), int(learnt.sum()), text.characters)
    return total


@contextmanager
def unquantised_caches() -> Iterator[None]:
    """Window KV, entries and index keys keep every bit inside this block."""
    rounded = quant._round
    quant._round = lambda values, fmt: values  # type: ignore[assignment]
    try:
        yield
    finally:
        quant._round = rounded


@dataclass(frozen=True)
class Replays:
    """Losses of the same tokens: cold, behind a replayed hit, and behind a cut prompt."""

    cold: Loss = NOTHING
    encoder: Loss = NOTHING
    decoder: Loss = NOTHING

    def __add__(self, other: Replays) -> Replays:
        return Replays(
            self.cold + other.cold,
            self.encoder + other.encoder,
            self.decoder + other.decoder,
        )

    def ratio(self, way: str) -> float:
        """Perplexity with a replay over that of a cold run."""
        replay: Loss = getattr(self, way)
        return replay.perplexity / self.cold.perplexity


def replays_of(model: Backbone, texts: Sequence[Text], tokens: int) -> Replays:
    """Those of up to ``tokens`` tokens behind the middle of each text that count, if it is long enough.

    The middle, a whole number of blocks, is both the end of the hit and the end of the prompt, so that all
    losses are of the same tokens, which are decoded. There is no third way: rows that a hit replays begin
    behind the first row that a cut prompt keeps.
    """
    sizes = Sizes.of(model.config)
    total = Replays()
    for text in texts:
        middle = len(text.ids) // 2 // BLOCK * BLOCK
        if middle <= sizes.rows:
            continue
        ids = torch.tensor(text.ids[: middle + tokens])
        learnt = torch.tensor(text.learnt[middle : middle + tokens])
        start, kept = middle - sizes.window, max(middle - sizes.rows, 0)
        logits, entries = replayed(model, ids, Cut(), {})
        hit = Cut(start, middle)
        total += Replays(
            _behind(logits, ids, learnt, 0),
            _behind(replayed(model, ids, hit, entries)[0], ids, learnt, start),
            _behind(replayed(model, ids, Cut(kept=kept), {})[0], ids, learnt, 0),
        )
    return total


def _behind(logits: torch.Tensor, ids: torch.Tensor, learnt: torch.Tensor, start: int) -> Loss:
    """Of the last tokens, those that ``learnt`` marks, given logits of the rows from ``start`` on."""
    middle = len(ids) - len(learnt)
    rows = logits[middle - 1 - start : -1].float()
    nats = F.cross_entropy(rows, ids[middle:], reduction="none")[learnt]
    return Loss(float(nats.sum(dtype=torch.float64)), int(learnt.sum()))
