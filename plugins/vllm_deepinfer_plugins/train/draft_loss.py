"""DSpark's losses: 0.1 × cross entropy + 0.9 × total variation + 1.0 × confidence, by place in the block.

Source: the DSpark paper (DeepSeek-AI, 2026): the label of the confidence head is the probability that the
draft is accepted, 1 − ½ ‖p_draft − p_target‖₁, and place k counts exp(−(k − 1) / γ).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from .compiled import compiled

CROSS_ENTROPY, TOTAL_VARIATION, CONFIDENCE = 0.1, 0.9, 1.0


class DraftLoss(NamedTuple):
    """The loss, and its parts as weighted means: nats, ‖·‖₁ between 0 and 2, nats.

    ``accepted`` is [γ], the mean probability that a draft is accepted if all before it are.
    """

    total: torch.Tensor
    cross_entropy: torch.Tensor
    variation: torch.Tensor
    confidence: torch.Tensor
    accepted: torch.Tensor


@compiled
def draft_loss(
    logits: torch.Tensor,
    confidence: torch.Tensor,
    target_logits: torch.Tensor,
    tokens: torch.Tensor,
) -> DraftLoss:
    """The loss of blocks of drafts.

    Args:
        logits: [anchors, γ, vocab], the drafter's with its Markov bias.
        confidence: [anchors, γ] logits.
        target_logits: [anchors, γ, vocab], of the backbone at the same places.
        tokens: [anchors, γ], those that the text has, −100 where a place does not count.
    """
    size = logits.shape[1]
    counted = tokens >= 0
    weight = torch.exp(-torch.arange(size, device=logits.device) / size) * counted
    weight = weight / weight.sum().clamp_min(1e-9)
    logs = logits.float().log_softmax(-1)
    variation = (logs.exp() - target_logits.float().softmax(-1)).abs().sum(-1)
    entropy = -logs.gather(-1, tokens.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    label = (1 - 0.5 * variation).detach().clamp(0, 1)
    sure = F.binary_cross_entropy_with_logits(confidence.float(), label, reduction="none")
    parts = [(part * weight).sum() for part in (entropy, variation, sure)]
    total = CROSS_ENTROPY * parts[0] + TOTAL_VARIATION * parts[1] + CONFIDENCE * parts[2]
    accepted = (label * counted).sum(0) / counted.sum(0).clamp_min(1)
    cross, distance, binary = (part.detach() for part in parts)
    return DraftLoss(total, cross, distance, binary, accepted)


def expected_length(accepted: torch.Tensor) -> float:
    """Mean tokens of a round, bonus included, if places were independent."""
    return 1.0 + float(accepted.cumprod(0).sum())
