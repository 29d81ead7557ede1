"""Where the drafter's keys are: the target's tokens in front of each anchor, and the block itself."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_deepinfer.checkpoint.config import LayerPlan, TextConfig

from ..model.attention import sink_attention
from ..model.sequence import Sequence, Store
from ..model.tiles import RowTiles

Context = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Layer number and positions [anchors, window] (negative: none) to keys [anchors, window, head_dim] in any
float dtype, finite also where there are none, and [anchors, window] bool, which of them are there."""


class BlockSequence(Sequence):
    """One pass of the drafter: γ rows for each anchor, row k of an anchor at its position + k.

    Args:
        anchors: [anchors] int64, positions of the anchor tokens.
        context: Finds the keys of tokens that the target has computed.
    """

    def __init__(self, config: TextConfig, anchors: torch.Tensor, tiles: RowTiles, context: Context) -> None:
        self.block = config.dspark_block_size
        places = torch.arange(self.block, device=anchors.device)
        super().__init__(config, (anchors.unsqueeze(-1) + places).flatten(), tiles)
        back = torch.arange(config.sliding_window, 0, -1, device=anchors.device)
        self._window = anchors.unsqueeze(-1) - back
        self._context, self._own = context, torch.empty(0)

    def put(self, store: Store, layer: int, rows: torch.Tensor) -> None:
        """The block's own keys, for the `attend` that follows: they outlive nothing."""
        self._own = rows

    def attend(self, plan: LayerPlan, queries: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        keys, seen = self._context(plan.index, self._window)
        own = self._own.unflatten(0, (-1, self.block))
        keys = torch.cat((keys.to(own.dtype), own), dim=1)
        seen = torch.cat((seen, seen.new_ones(len(seen), self.block)), dim=1)
        # One row per anchor whose queries are its block's: a block shares its keys.
        blocks = queries.unflatten(0, (-1, self.block))
        attended: torch.Tensor = self.tiles(lambda q, k, s: _attend(q, k, s, sink), blocks, keys, seen)
        return attended.flatten(0, 1)

    def history(self, store: Store, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("a draft block pools nothing and has no n-grams")

    def put_entries(self, plan: LayerPlan, entries: torch.Tensor) -> None:
        raise NotImplementedError("a draft block has no compressor")

    def select(self, plan: LayerPlan, queries: torch.Tensor, weights: torch.Tensor) -> None:
        raise NotImplementedError("a draft block has no indexer")


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, sink: torch.Tensor
) -> torch.Tensor:
    """Queries [anchors, γ, heads, head_dim] over keys [anchors, n, head_dim], as so many more heads."""
    merged = sink_attention(queries.flatten(1, 2), keys, seen, sink.repeat(queries.shape[1]))
    return merged.unflatten(1, queries.shape[1:3])
