"""The backbone's training: next-token loss, the indexer's loss, and the balance of the experts."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from ..model.backbone import Backbone
from .batches import Batch
from .compiled import compiled
from .forward import Pass
from .loop import Run, Training
from .optimizer import Rates
from .ranks import world
from .schedule import Schedule

RATES = Rates()


@compiled
def token_loss(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropies in nats of [tokens, hidden], summed by weight and as they are; −100 is no target."""
    logits = F.linear(hidden, head.to(hidden.dtype)).float()
    losses = F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    return (losses * weights).sum(), losses.detach().sum()


class BackboneTraining(Training):
    """Figures: ``bits`` of a counted token, and the indexer's ``divergence`` in nats over its sources."""

    NAME = "backbone"

    def __init__(self, model: Backbone, run: Run, schedule: Schedule, rates: Rates = RATES) -> None:
        super().__init__(model, model.config.o_groups, run, schedule, rates)
        self.backbone = model

    def update(self, batch: Batch, whole: Batch) -> dict[str, float]:
        sparse = self.schedule.selects(self.step)
        passed = Pass(self.backbone, batch.ids, self.options.dtype, sparse=sparse, first=self.step).run()
        weighted, plain = token_loss(
            passed.hidden, self.backbone.head.weight, batch.targets.flatten(), batch.weights.flatten()
        )
        loss = weighted / whole.weights.sum().clamp_min(1)
        divergence = sum(passed.divergences, loss.new_zeros(())) / world()
        self.descend(loss + divergence, (layer.ffn for layer in self.backbone.layers), passed.loads)
        counted = max(1, int((whole.targets >= 0).sum()))
        return {"bits": plain.item() / counted / math.log(2), "divergence": divergence.item()}
