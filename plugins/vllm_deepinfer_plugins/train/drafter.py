"""The drafter's training, with the backbone frozen: anchors inside the text, the paper's losses."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ..draft.blocks import Drafter
from ..model.backbone import Backbone
from ..model.tiles import RowTiles
from .batches import Batch
from .draft_loss import draft_loss, expected_length
from .drafts import DraftPass
from .forward import Pass
from .loop import Run, Training
from .optimizer import Rates
from .ranks import rank, world
from .schedule import Schedule

ANCHORS = 512
"""Blocks of drafts in a step."""
RATES = Rates(matrix=0.01, table=2e-3, other=2e-3)


class DrafterTraining(Training):
    """Figures: the parts of the loss, and the mean length of a round if places were independent.

    Args:
        backbone: Trained; it is not changed, and its selection is in force.
    """

    NAME = "drafter"

    def __init__(
        self, drafter: Drafter, backbone: Backbone, run: Run, schedule: Schedule, rates: Rates = RATES
    ) -> None:
        beside = {"backbone": fingerprint(backbone)}
        super().__init__(drafter, drafter.config.o_groups, run, schedule, rates, beside)
        self.drafter, self.backbone = drafter, backbone.requires_grad_(False)
        self.taps = drafter.config.dspark_target_layer_ids

    def update(self, batch: Batch, whole: Batch) -> dict[str, float]:
        ids, targets = batch.ids.flatten(), batch.targets.flatten()
        with torch.no_grad():
            passed = Pass(self.backbone, batch.ids, self.options.dtype, sparse=True, taps=self.taps).run()
        features = torch.cat(passed.taps, dim=-1)
        seed = (self.options.seed, self.step, rank())
        anchors = choose_anchors(batch.targets, self.drafter.block_size, seed, ANCHORS // world())
        drafts = DraftPass(
            self.drafter, self.backbone.embed.weight, features, batch.ids.shape[1], self.options.dtype
        )
        hidden, loads = drafts.run(ids, anchors)
        places = anchors.unsqueeze(1) + torch.arange(self.drafter.block_size, device=anchors.device)
        bias, confidence = self.drafter.step(hidden.float(), ids[places].flatten(), RowTiles())
        assert confidence is not None
        head = self.backbone.head.weight.to(hidden.dtype)
        logits = F.linear(hidden, head).float() + bias
        target = F.linear(passed.hidden[places.flatten()], head)
        loss = draft_loss(
            logits.unflatten(0, places.shape),
            confidence.view(places.shape),
            target.unflatten(0, places.shape),
            targets[places],
        )
        self.descend(loss.total / world(), (block.ffn for block in self.drafter.mtp), loads)
        figures = {
            "cross_entropy": loss.cross_entropy.item(),
            "variation": loss.variation.item(),
            "confidence": loss.confidence.item(),
            "length": expected_length(loss.accepted),
        }
        return {name: value / world() for name, value in figures.items()}


def fingerprint(model: nn.Module) -> str:
    """Sixteen digits that another backbone would not have."""
    digest = hashlib.sha256()
    for name, value in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(value.detach().float().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def choose_anchors(targets: torch.Tensor, size: int, seed: tuple[int, ...], count: int) -> torch.Tensor:
    """At most ``count`` places [anchors] of flat [batch × length], in order, with room for a block behind.

    A place is an anchor only where the next token counts: the drafter is never asked inside a prompt.
    """
    allowed = targets >= 0
    allowed[:, targets.shape[1] - size + 1 :] = False
    places = allowed.flatten().nonzero().squeeze(1)
    order = np.random.default_rng(seed).permutation(len(places))[:count]
    return places[torch.from_numpy(np.sort(order)).to(places.device)]
