"""The drafter's forward pass over many anchors of a batch, in this package's rows; held to `draft.whole`."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ..draft.blocks import Drafter
from ..kernels import suspended
from ..model.attention import sink_attention
from ..model.block import Block
from ..model.cached import cached_row
from ..model.rope import Rotary
from .forward import Turns
from .rows import Sizes, collapse, enter, expert_parts, hyper_parts, leave, norm, query_parts


class DraftPass:
    """One pass of the drafter: γ rows for each anchor.

    Args:
        embedding: The backbone's, [vocab, hidden].
        features: [batch × length, taps × hidden], means over the streams of the tapped layers' inputs.
        length: Tokens of a sequence.
        dtype: What activations and products have.
    """

    def __init__(
        self,
        drafter: Drafter,
        embedding: torch.Tensor,
        features: torch.Tensor,
        length: int,
        dtype: torch.dtype,
    ) -> None:
        self.drafter, self.config, self.embedding, self.dtype = drafter, drafter.config, embedding, dtype
        self.length, self.rotary = length, Rotary(drafter.config, compressed=False)
        self.sizes = Sizes.of(self.config, self.config.dspark_num_experts_per_tok)
        places = torch.arange(length, device=features.device).repeat(len(features) // length)
        self.keys = drafter.context(features.float(), self.rotary(places))

    def run(self, ids: torch.Tensor, anchors: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Normalised states [anchors × γ, hidden] and the tokens of each expert of each block.

        By PyTorch alone: an engine's kernels take parameters of the activations' dtype.

        Args:
            ids: [batch × length] token ids. anchors: [anchors], places in them.
        """
        with suspended():
            return self._run(ids, anchors)

    def _run(self, ids: torch.Tensor, anchors: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        config, size = self.config, self.drafter.block_size
        inputs = anchors.new_full((len(anchors), size), config.dspark_noise_token_id)
        inputs[:, 0] = ids[anchors]
        streams = F.embedding(inputs.flatten(), self.embedding).to(self.dtype)
        streams = streams.unsqueeze(1).expand(-1, config.hc_mult, -1).contiguous()
        pre = torch.zeros(config.hc_mult, len(streams), device=streams.device)
        pre[0] = 1
        places = anchors % self.length
        turns = Turns.at(self.rotary, (places.unsqueeze(1) + torch.arange(size, device=ids.device)).flatten())
        back = torch.arange(config.sliding_window, 0, -1, device=ids.device)
        seen = places.unsqueeze(1) >= back
        window = (anchors.unsqueeze(1) - back).clamp_min(0)
        loads = []
        for block, keys in zip(self.drafter.mtp, self.keys, strict=True):
            streams, pre, load = self._block(block, streams, pre, turns, keys[window], seen)
            loads.append(load)
        return norm(collapse(streams, pre), self.drafter.mtp[-1].norm.weight, self.sizes.norm_eps), loads

    def _block(
        self,
        block: Block,
        streams: torch.Tensor,
        pre: torch.Tensor,
        turns: Turns,
        context: torch.Tensor,
        seen: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        attn, size = block.attn, self.drafter.block_size
        *mixed, _, _, query, raw = enter(
            streams,
            pre,
            hyper_parts(block.hc_attn),
            block.attn_norm.weight,
            query_parts(attn),
            turns.cos,
            turns.sin,
            self.sizes,
        )
        own = cached_row(raw, turns.complex, "fp8", attn.kv_norm).unflatten(0, (-1, size))
        keys = torch.cat((context.to(own.dtype), own), dim=1)
        seen = torch.cat((seen, seen.new_ones(len(seen), size)), dim=1)
        rows = query.unflatten(0, (-1, size)).flatten(1, 2)
        attended = sink_attention(rows, keys, seen, attn.attn_sink.repeat(size)).view(query.shape)
        return leave(
            attended,
            streams,
            (mixed[1], mixed[2], mixed[0]),
            (attn.wo_a.weight, attn.wo_b.weight),
            hyper_parts(block.hc_ffn),
            block.ffn_norm.weight,
            expert_parts(block.ffn),
            turns.cos,
            turns.sin,
            self.sizes,
        )
