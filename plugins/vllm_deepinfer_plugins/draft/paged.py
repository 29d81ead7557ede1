"""The drafter inside vLLM: its window KV lies in vLLM's blocks, beside the target's.

The keys that a block sees in front of its anchor depend on the target alone. So the target's own forward pass
writes them, for every token whose tapped layers it computes, into stores of the target's window group: what
vLLM's block manager does with the target's KV (prefix hits, replays, preemption, rejected drafts that are
overwritten) it does with these. There is no state of a request to lose, and nothing to rebuild.

An anchor at position a reads a − W … a − 1, one row more than a layer of the target, but for a token that has
no row yet. vLLM keeps the W − 1 tokens in front of those that a step computes, and the anchor is at least one
behind them: the oldest key is still there. So it is with replays. Behind a hit of H tokens the target
computes rows from H − W on, and the anchor is at H or later. Of a prompt of N tokens the last W + 12 rows go
behind the last KV source, and the anchor is at N or later. Its window is whole in both cases, so that no read
is clamped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_deepinfer.checkpoint.config import TextConfig

from ..model.paged import PagedSequence
from ..model.quant import CACHE_DTYPE
from ..model.sequence import Sequence, Store
from ..model.stores import PagedMetadata, PagedStore, window_kind
from ..model.tiles import RowTiles
from .blocks import Drafter, plans
from .sequence import BlockSequence


def draft_stores(
    vllm_config: Any, config: TextConfig, prefix: str, *, replayed: bool
) -> dict[tuple[Store, int], PagedStore]:
    """Window KV of each block, registered with vLLM in the target's window group.

    Args:
        replayed: As of `causal_lm.make_stores`.
    """
    return {
        (Store.WINDOW, plan.index): PagedStore(
            vllm_config,
            f"{prefix}layers.{plan.index}.attn.window",
            config.head_dim,
            CACHE_DTYPE,
            **window_kind(config, replayed=replayed),
        )
        for plan in plans(config)
    }


class PagedDrafter:
    """The drafter and what the last step of the target left for it.

    Args:
        drafter: The blocks.
        stores: From `draft_stores`.
        tiles: How row functions are run.
    """

    def __init__(
        self, drafter: Drafter, stores: Mapping[tuple[Store, int], PagedStore], tiles: RowTiles
    ) -> None:
        self.drafter, self.stores, self.tiles = drafter, stores, tiles
        self._taps = drafter.config.dspark_target_layer_ids
        self._features: list[torch.Tensor] = []
        self._metadata: Mapping[str, PagedMetadata] = {}

    def tap(self, layer: int, streams: torch.Tensor, sequence: Sequence) -> None:
        """For `Backbone.tap`: at the last tapped layer the keys of the rows that reach it are written."""
        if not isinstance(sequence, PagedSequence):
            return
        if layer == 0:
            self._features.clear()
            self._metadata = sequence.metadata
        if layer not in self._taps:
            return
        self._features.append(sequence.tiles(_mean, streams))
        if layer != self._taps[-1]:
            return
        features = torch.cat([_taken(rows, sequence) for rows in self._features], dim=-1)
        keys = self.tiles(self.drafter.context, features, sequence.rotations(0))
        for plan, rows in zip(self.drafter.plans, keys, strict=True):
            sequence.put(Store.WINDOW, plan.index, rows)
        self._features.clear()

    def hidden(
        self, requests: torch.Tensor, anchors: torch.Tensor, positions: torch.Tensor, embedding: torch.Tensor
    ) -> torch.Tensor:
        """Normalised states [anchors × γ, hidden] after the target's last step.

        Args:
            requests: [anchors] int64, rows of that step's block tables.
            anchors: [anchors] token ids. positions: [anchors] int64, theirs.
            embedding: The target's, [vocab, hidden].
        """

        def context(layer: int, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            store = self.stores[Store.WINDOW, layer]
            rows = _rows(store, self._metadata[store.prefix].block_table, requests, places)
            return store.rows.index_select(0, rows.flatten()).unflatten(0, rows.shape), places >= 0

        sequence = BlockSequence(self.drafter.config, positions, self.tiles, context)
        return self.drafter(anchors, embedding, sequence)


def _taken(rows: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """Of rows that were tapped in front of the last KV source, those that go behind it."""
    return rows if len(rows) == len(sequence.positions) else rows[sequence.taken]


def _mean(streams: torch.Tensor) -> torch.Tensor:
    return streams.mean(1)


def _rows(
    store: PagedStore, table: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Row numbers of positions [anchors, n]; row 0, in the null block, where there is no such token."""
    safe = positions.clamp_min(0)
    blocks = table[requests.unsqueeze(-1), safe // store.block_size].long()
    rows = blocks * store.rows_per_block + safe % store.block_size
    return torch.where(positions >= 0, rows, 0)
