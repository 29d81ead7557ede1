"""DSpark's blocks: one parallel pass over an anchor and noise, conditioned on what the target computed.

    target layers' inputs ─ mean of streams ─► main_proj ─► main_norm ─► keys of each block   (once per token)
    [anchor, noise × (γ − 1)] ─ embed ─► block 0 ─► block 1 ─► block 2 ─► norm ─► head + Markov bias

A query sees the target's last `sliding_window` tokens in front of its anchor, and its own block both ways.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from vllm_deepinfer.checkpoint.config import LayerPlan, TextConfig

from ..model.block import Block
from ..model.layers import Linear, RMSNorm
from ..model.mhc import collapse
from ..model.tiles import RowTiles
from .heads import ConfidenceHead, MarkovHead
from .sequence import BlockSequence


def plans(config: TextConfig) -> tuple[LayerPlan, ...]:
    """The blocks as layers behind the backbone's: window attention, nothing owned but window KV."""
    first = config.num_hidden_layers
    return tuple(
        LayerPlan(first + stage, 0, None, None, False, False, False, False, None)
        for stage in range(config.num_nextn_predict_layers)
    )


class Drafter(nn.Module):
    """The drafter of a checkpoint, parameters under their released names.

    Embedding and head are the target's: they are passed in where they are needed.

    Args:
        config: With at least one block.
        dtype: As of `Backbone`.
    """

    def __init__(self, config: TextConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        experts = {
            "n_routed_experts": config.dspark_n_routed_experts,
            "num_experts_per_tok": config.dspark_num_experts_per_tok,
        }
        own = config.model_copy(update=experts)
        self.plans = plans(config)
        self.mtp = nn.ModuleList(Block(own, plan, dtype) for plan in self.plans)
        hidden, rank = config.hidden_size, config.dspark_markov_rank
        first, last = self.mtp[0], self.mtp[-1]
        first.main_proj = Linear(len(config.dspark_target_layer_ids) * hidden, hidden, dtype)
        first.main_norm = RMSNorm(hidden, config.rms_norm_eps, dtype)
        last.norm = RMSNorm(hidden, config.rms_norm_eps, dtype)
        last.markov_head = MarkovHead(config.vocab_size, rank, dtype)
        last.confidence_head = ConfidenceHead(hidden, rank)

    @property
    def block_size(self) -> int:
        """Tokens that one pass drafts, γ."""
        return self.config.dspark_block_size

    @property
    def confident(self) -> bool:
        """Whether there is a confidence head: a checkpoint may come without."""
        return self.mtp[-1].confidence_head is not None

    def context(self, features: torch.Tensor, rotations: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Window KV [tokens, head_dim] of each block from what the target computed for the tokens.

        Args:
            features: [tokens, taps × hidden], means over the streams of the tapped layers' inputs.
            rotations: [tokens, pairs] at the tokens' own positions.
        """
        first = self.mtp[0]
        x = first.main_norm(first.main_proj(features))
        return tuple(block.attn.keys(x, rotations)[0] for block in self.mtp)

    def forward(
        self, anchors: torch.Tensor, embedding: torch.Tensor, sequence: BlockSequence
    ) -> torch.Tensor:
        """Normalised states [anchors × γ, hidden].

        Args:
            anchors: [anchors] token ids.
            embedding: The target's, [vocab, hidden].
            sequence: Where each anchor stands, and the keys in front of it.
        """
        ids = anchors.new_full((len(anchors), self.block_size), self.config.dspark_noise_token_id)
        ids[:, 0] = anchors
        streams = F.embedding(ids.flatten(), embedding).unsqueeze(1).expand(-1, self.config.hc_mult, -1)
        pre = torch.zeros(ids.numel(), self.config.hc_mult, device=ids.device)
        pre[:, 0] = 1
        for block in self.mtp:
            streams, pre = block(streams, pre, sequence, None)
        norm = self.mtp[-1].norm
        hidden: torch.Tensor = sequence.tiles(lambda s, p: norm(collapse(s, p)), streams, pre)
        return hidden

    def step(
        self, hidden: torch.Tensor, previous: torch.Tensor, tiles: RowTiles
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Markov bias [n, vocab] and confidence logits [n] (None without a head) at one place of each block.

        Args:
            hidden: [n, hidden], normalised. previous: [n], the tokens before the ones to be drafted.
        """
        return tiles(self._step, hidden, previous)  # type: ignore[no-any-return]

    def _step(self, hidden: torch.Tensor, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        last = self.mtp[-1]
        bias, embedded = last.markov_head(previous)
        if last.confidence_head is None:
            return bias, None
        return bias, last.confidence_head(hidden, embedded)
