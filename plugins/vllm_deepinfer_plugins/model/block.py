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
        self,
        streams: torch.Tensor,
        pre: torch.Tensor,
        sequence: Sequence,
        engram_rows: torch.Tensor | None,
        written: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer over all rows of a forward pass.

        Args:
            streams: [tokens, n, hidden].
            pre: [tokens, n] float32, the preceding sub-layer's ``pre`` mix.
            engram_rows: [tokens, Engram layers, heads], or None without Engram.
            written: `write` has been called for these rows.

        Returns:
            The next streams and ``pre``.
        """
        tiles = sequence.tiles
        streams = self._read_engram(streams, sequence, engram_rows)
        rotations = sequence.rotations(self.plan.ratio)
        *mix, query, window, raw, index_query, index_weight = tiles(self._enter, streams, pre, rotations)
        projected = Projected(query, window, raw, index_query, index_weight)
        if not written:
            self._put(window, raw, sequence)
        attended = self._attend(projected, sequence)
        streams, x, experts, weights, *ffn_mix = tiles(
            self._between, attended, rotations, streams, *mix, sequence.image
        )
        output = self.ffn(x, experts, weights, tiles)
        return tiles(expand, output, streams, *ffn_mix[1:]), ffn_mix[0]

    def write(
        self, streams: torch.Tensor, pre: torch.Tensor, sequence: Sequence, engram_rows: torch.Tensor | None
    ) -> None:
        """Only what the rows leave in the caches; arguments as of `forward`."""
        streams = self._read_engram(streams, sequence, engram_rows)
        rotations = sequence.rotations(self.plan.ratio)
        window, raw = sequence.tiles(self._keys, streams, pre, rotations)
        self._put(window, raw, sequence)

    def _read_engram(
        self, streams: torch.Tensor, sequence: Sequence, rows: torch.Tensor | None
    ) -> torch.Tensor:
        if self.engram is None:
            return streams
        assert rows is not None
        read: torch.Tensor = sequence.tiles(self.engram, streams, rows[:, self.plan.engram], sequence.image)
        return read

    def _put(self, window: torch.Tensor, raw: torch.Tensor | None, sequence: Sequence) -> None:
        plan = self.plan
        sequence.put(Store.WINDOW, plan.index, window)
        if not plan.owns_kv:
            return
        assert raw is not None
        group = raw.unsqueeze(1)
        if plan.ratio > 1:
            sequence.put(Store.POOL, plan.index, raw)
            group, _ = sequence.history(Store.POOL, plan.index, plan.ratio)
        rotations = sequence.rotations(plan.ratio, first_of_group=True)
        sequence.put_entries(plan, sequence.tiles(self.attn.entry, group, rotations))

    def _attend(self, projected: Projected, sequence: Sequence) -> torch.Tensor:
        plan = self.plan
        if plan.owns_index:
            assert projected.index_query is not None and projected.index_weight is not None
            sequence.select(plan, projected.index_query, projected.index_weight)
        return sequence.attend(plan, projected.query, self.attn.attn_sink)

    def _enter(
        self, streams: torch.Tensor, pre: torch.Tensor, rotations: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, *mix = enter(self.hc_attn, self.attn_norm, streams, pre)
        return (*mix, *self.attn.project(x, rotations))

    def _keys(
        self, streams: torch.Tensor, pre: torch.Tensor, rotations: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, *_ = enter(self.hc_attn, self.attn_norm, streams, pre)
        return self.attn.keys(x, rotations)

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
