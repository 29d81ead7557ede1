"""The plain form: drafts for any anchors of one whole sequence, no cache; what the engine is held to."""

from __future__ import annotations

import torch

from ..model.backbone import Backbone
from ..model.rope import Rotary
from ..model.sequence import Sequence
from ..model.tiles import RowTiles
from ..model.whole import WholeSequences
from .blocks import Drafter
from .sequence import BlockSequence


def features_of(backbone: Backbone, ids: torch.Tensor, layers: tuple[int, ...]) -> torch.Tensor:
    """What the drafter sees of the target: [length, taps × hidden] for token ids [length]."""
    found: list[torch.Tensor] = []

    def tap(layer: int, streams: torch.Tensor, sequence: Sequence) -> None:
        if layer in layers:
            found.append(streams.mean(1))

    before, backbone.tap = backbone.tap, tap
    try:
        backbone(ids, WholeSequences(backbone.config, 1, len(ids), ids.device))
    finally:
        backbone.tap = before
    return torch.cat(found, dim=-1)


def teacher_forced(
    drafter: Drafter, backbone: Backbone, ids: torch.Tensor, features: torch.Tensor, anchors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft logits [anchors, γ, vocab] and confidence logits [anchors, γ] with the true previous tokens.

    Args:
        ids: [length]. features: [length, taps × hidden].
        anchors: [anchors] int64 positions, each followed by γ − 1 tokens of ``ids``.
    """
    tiles, size = RowTiles(), drafter.block_size
    keys = drafter.context(features, Rotary(drafter.config, compressed=False)(torch.arange(len(ids))))

    def context(layer: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return keys[layer - drafter.config.num_hidden_layers][positions.clamp_min(0)], positions >= 0

    sequence = BlockSequence(drafter.config, anchors, tiles, context)
    hidden = drafter(ids[anchors], backbone.embed.weight, sequence)
    previous = ids[anchors.unsqueeze(-1) + torch.arange(size)].flatten()
    bias, confidence = drafter.step(hidden, previous, tiles)
    assert confidence is not None, "a checkpoint without a confidence head has no confidences"
    logits = backbone.logits(hidden) + bias
    return logits.unflatten(0, (-1, size)), confidence.unflatten(0, (-1, size))
