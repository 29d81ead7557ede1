"""The drafter's figures from its plain form: how many drafts are accepted, and what confidence is worth.

Anchors are all tokens of held-out text (or of its answers) that a whole block follows. Draft k is accepted
with the probability that draft and target agree, one minus their total variation distance: what lossless
sampling accepts on average at temperature 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from ...draft.blocks import Drafter
from ...draft.whole import features_of, teacher_forced
from ...model.backbone import Backbone
from .texts import Text

ANCHORS = 256
"""Most of one text, evenly spaced."""


@dataclass
class Drafts:
    """What was seen of blocks of drafts.

    Attributes:
        agreement: [blocks, γ], the probability that draft k is accepted if all before it are.
        likeliest: [blocks, γ], whether the likeliest tokens of draft and target are the same.
        confidence: [blocks, γ], what the drafter says of it.
    """

    agreement: list[NDArray[np.float64]] = field(default_factory=list)
    likeliest: list[NDArray[np.bool_]] = field(default_factory=list)
    confidence: list[NDArray[np.float64]] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        """How many."""
        return sum(map(len, self.agreement))

    @property
    def accepted_length(self) -> float:
        """Mean tokens per verified block at temperature 1, the bonus token included."""
        return 1 + float(np.concatenate(self.agreement).cumprod(1).sum(1).mean())

    @property
    def greedy_length(self) -> float:
        """The same at temperature 0, along the text."""
        return 1 + float(np.concatenate(self.likeliest).cumprod(1).sum(1).mean())

    def add(self, other: Drafts) -> None:
        """Take another's blocks in."""
        self.agreement += other.agreement
        self.likeliest += other.likeliest
        self.confidence += other.confidence

    def auc(self) -> float | None:
        """The chance that a draft that agrees has more confidence than one that does not."""
        hits, scores = np.concatenate(self.likeliest).ravel(), np.concatenate(self.confidence).ravel()
        return area_under_curve(hits, scores)


def area_under_curve(hits: NDArray[np.bool_], scores: NDArray[np.float64]) -> float | None:
    """Of ``scores`` as a predictor of ``hits``, ties counted half; None where all are alike."""
    good, bad = int(hits.sum()), int((~hits).sum())
    if not good or not bad:
        return None
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    ranks = ((last - counts + 1 + last) / 2)[inverse]
    return float((ranks[hits].sum() - good * (good + 1) / 2) / (good * bad))


@torch.no_grad()
def drafts_of(drafter: Drafter, backbone: Backbone, texts: Sequence[Text]) -> Drafts:
    """Blocks of drafts at the anchors of texts."""
    found = Drafts()
    for text in texts:
        anchors = anchors_of(text, drafter.block_size)
        if not len(anchors):
            continue
        ids = torch.tensor(text.ids)
        features = features_of(backbone, ids, tuple(backbone.config.dspark_target_layer_ids))
        target = backbone.whole(ids.unsqueeze(0))[0]
        logits, confidence = teacher_forced(drafter, backbone, ids, features, anchors)
        wanted = target[anchors.unsqueeze(1) + torch.arange(drafter.block_size)]
        chances = torch.minimum(logits.softmax(-1), wanted.softmax(-1)).sum(-1)
        found.agreement.append(chances.double().numpy())
        found.likeliest.append((logits.argmax(-1) == wanted.argmax(-1)).numpy())
        found.confidence.append(confidence.sigmoid().double().numpy())
    return found


def anchors_of(text: Text, block: int) -> torch.Tensor:
    """Positions whose next ``block`` tokens all count, at most `ANCHORS` of them."""
    learnt = np.array(text.learnt, dtype=np.int64)
    sums = np.concatenate(([0], learnt.cumsum()))
    places = [
        place for place in range(len(learnt) - block) if sums[place + 1 + block] - sums[place + 1] == block
    ]
    step = -(-len(places) // ANCHORS) or 1
    return torch.tensor(places[::step], dtype=torch.int64)
