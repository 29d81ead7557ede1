"""One layer: attention and experts between hyper-connections, with an Engram read in front of some layers."""

from __future__ import annotations

import torch
from torch import nn

from vllm_deepinfer.checkpoint.config import LayerPlan, TextConfig

from .attention import Attention, Projected
from .engram import Engram
from .layers import RMSNorm
from .mhc import HyperConnection, enter, expand
from .moe import MoE
from .sequence import Sequence, Store

Mix = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """A layer in the released layout.

    Its work falls into functions of rows, run by ``sequence.tiles``, between writes and reads of the caches.
    """

    def __init__(self, config: TextConfig, plan: LayerPlan, dtype: torch.dtype) -> None:
        super().__init__()
        self.plan = plan
        self.engram = None if plan.engram is None else Engram(config, plan.engram, dtype)
        self.hc_attn, self.hc_ffn = HyperConnection(config), HyperConnection(config)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attn = Attention(config, plan, dtype)
        self.ffn = MoE(config, dtype, config.n_routed_experts, config.num_experts_per_tok)

    def forward(
        self, streams: torch.Tensor, pre: torch.Tensor, sequence: Sequence, engram_rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer over all rows of a forward pass.

        Args:
            streams: [tokens, n, hidden].
            pre: [tokens, n] float32, the preceding sub-layer's ``pre`` mix.
            engram_rows: [tokens, Engram layers, heads], or None without Engram.

        Returns:
            The next streams and ``pre``.
        """
        tiles, plan = sequence.tiles, self.plan
        if self.engram is not None:
            assert engram_rows is not None
            streams = tiles(self.engram, streams, engram_rows[:, plan.engram], sequence.image)
        rotations = sequence.rotations(plan.ratio)
        *mix, query, window, raw, index_query, index_weight = tiles(self._enter, streams, pre, rotations)
        projected = Projected(query, window, raw, index_query, index_weight)
        attended = self._attend(projected, sequence)
        streams, x, experts, weights, *ffn_mix = tiles(
            self._between, attended, rotations, streams, *mix, sequence.image
        )
        output = self.ffn(x, experts, weights, tiles)
        return tiles(expand, output, streams, *ffn_mix[1:]), ffn_mix[0]

    def _attend(self, projected: Projected, sequence: Sequence) -> torch.Tensor:
        plan = self.plan
        sequence.put(Store.WINDOW, plan.index, projected.window)
        if plan.owns_kv:
            assert projected.raw is not None
            group = projected.raw.unsqueeze(1)
            if plan.ratio > 1:
                sequence.put(Store.POOL, plan.index, projected.raw)
                group, _ = sequence.history(Store.POOL, plan.index, plan.ratio)
            rotations = sequence.rotations(plan.ratio, first_of_group=True)
            sequence.put_entries(plan, sequence.tiles(self.attn.entry, group, rotations))
        if plan.owns_index:
            assert projected.index_query is not None and projected.index_weight is not None
            sequence.select(plan, projected.index_query, projected.index_weight)
        return sequence.attend(plan, projected.query, self.attn.attn_sink)

    def _enter(
        self, streams: torch.Tensor, pre: torch.Tensor, rotations: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, *mix = enter(self.hc_attn, self.attn_norm, streams, pre)
        return (*mix, *self.attn.project(x, rotations))

    def _between(
        self,
        attended: torch.Tensor,
        rotations: torch.Tensor,
        streams: torch.Tensor,
        pre: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        image: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        streams = expand(self.attn.output(attended, rotations), streams, post, comb)
        x, *mix = enter(self.hc_ffn, self.ffn_norm, streams, pre)
        return (streams, x, *self.ffn.gate(x, image), *mix)
