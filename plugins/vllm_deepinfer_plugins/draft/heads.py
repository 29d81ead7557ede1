"""The drafter's two heads: what follows the token before, and how likely a draft is to be accepted."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..model.layers import Linear


class MarkovHead(nn.Module):
    """Bias on the next token's logits from the token before it, of low rank."""

    def __init__(self, vocab: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, rank, dtype=dtype)
        self.head = Linear(rank, vocab, dtype)

    def forward(self, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Bias [n, vocab] float32 and embeddings [n, rank] of previous tokens [n]."""
        embedded = F.embedding(previous, self.embed.weight)
        return self.head(embedded).float(), embedded


class ConfidenceHead(nn.Module):
    """Probability that the target accepts a draft if it accepts all before it, in float32.

    It sees the token *before* the draft, never the draft: a choice by confidence may look at it.
    """

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.proj = Linear(hidden + rank, 1, torch.float32)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Logits [n] of normalised states [n, hidden] and Markov embeddings [n, rank]."""
        logits: torch.Tensor = self.proj(torch.cat((hidden.float(), embedded.float()), dim=-1))
        return logits.squeeze(-1)
