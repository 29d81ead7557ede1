"""SWA Bounded Replay by the letter: one request, dense arrays by position, every layer over every row.

The rule is in `_floor` and in the masks that follow from it; no row is left out and nothing is paged. Row
functions run in the tiles of batch-invariant mode, so that the paged form must give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm_deepinfer_plugins.model.attention import sink_attention
from vllm_deepinfer_plugins.model.indexer import index_scores
from vllm_deepinfer_plugins.model.paged import KEY_TILE
from vllm_deepinfer_plugins.model.selection import Candidates, top_positions
from vllm_deepinfer_plugins.model.sequence import Sequence, Store
from vllm_deepinfer_plugins.model.tiles import ROWS, RowTiles

from vllm_deepinfer.checkpoint.config import LayerPlan

Entries = dict[int, torch.Tensor]


class Literal(Sequence):
    """Rows ``start`` to the end of one request.

    Args:
        model: The backbone.
        ids: [length], of the whole request.
        start: s, the first position that is computed.
        cached: By KV source, the entries of the tokens before ``hit``, which are not computed again.
        hit: H.
        kept: The first position behind the last KV source.
    """

    def __init__(
        self, model: Any, ids: torch.Tensor, *, start: int = 0, hit: int = 0, kept: int = 0, cached: Entries
    ) -> None:
        super().__init__(model.config, torch.arange(start, len(ids)), RowTiles(ROWS))
        self.model, self.ids, self.start, self.hit, self.kept_from = model, ids, start, hit, kept
        self.entries: Entries = {}
        self.cached = cached
        self.rows: dict[tuple[Store, int], torch.Tensor] = {}
        self.selected = self.blocks = torch.empty(0)

    def _floor(self, layer: int) -> int:
        behind = layer > self.model.last_source
        return max(self.start, self.kept_from) if behind else self.start

    def put(self, store: Store, layer: int, rows: torch.Tensor) -> None:
        if store is not Store.IDS:
            whole = rows.new_full((len(self.ids), rows.shape[1]), torch.nan)
            whole[self.start :] = rows
            self.rows[store, layer] = whole

    def history(self, store: Store, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = self.positions.unsqueeze(1) - torch.arange(count - 1, -1, -1)
        rows = self.ids.unsqueeze(1) if store is Store.IDS else self.rows[store, layer]
        return rows[at.clamp_min(0)], at >= 0

    def put_entries(self, plan: LayerPlan, entries: torch.Tensor) -> None:
        new = [
            row for at, row in zip(self.positions.tolist(), entries, strict=True) if self._completes(plan, at)
        ]
        before = self.cached[plan.index][: self.hit // plan.ratio] if self.hit else entries.new_empty(0, 0)
        self.entries[plan.index] = torch.stack([*before, *new]) if len(before) or new else entries[:0]

    def _completes(self, plan: LayerPlan, at: int) -> bool:
        return at >= self.hit and (at + 1) % plan.ratio == 0

    def select(self, plan: LayerPlan, queries: torch.Tensor, weights: torch.Tensor) -> None:
        assert plan.kv_source is not None
        keys = self.entries[plan.kv_source][:, self.config.head_dim :]
        visible = self.visible(plan.ratio)
        parts = []
        for first in range(0, max(len(keys), 1), KEY_TILE):
            tile = keys.new_zeros(KEY_TILE, self.config.index_head_dim)
            tile[: len(keys[first : first + KEY_TILE])] = keys[first : first + KEY_TILE]
            shared = tile.expand(len(queries), -1, -1)
            parts.append(self.tiles(index_scores, queries, weights, shared).float())
        scores = torch.cat(parts, dim=1)
        unseen = torch.arange(scores.shape[1]) >= visible.unsqueeze(1)
        scores = scores.masked_fill(unseen, -torch.inf)
        candidates = Candidates(self.config.candidate_topk_blocks, self.config.candidate_block_size, True)
        if plan.is_candidate_source:
            self.blocks = candidates.choose(scores, visible)
        elif plan.uses_candidates:
            scores = candidates.keep(scores, self.blocks)
        self.selected = top_positions(scores, self.config.index_topk, by_position=True)

    def attend(self, plan: LayerPlan, queries: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        at = self.positions.unsqueeze(1) - torch.arange(self.config.sliding_window - 1, -1, -1)
        floor = torch.full_like(at, self._floor(plan.index))
        # A row in front of the floor is one that the rule does not compute: it sees itself, for nobody.
        seen = (at >= torch.minimum(floor, self.positions.unsqueeze(1))) & (at >= 0)
        keys = self.rows[Store.WINDOW, plan.index][at.clamp_min(0)]
        if plan.kv_source is not None:
            entries = self.entries[plan.kv_source][:, : self.config.head_dim]
            entries = torch.cat((entries, entries.new_zeros(1, self.config.head_dim)))
            keys = torch.cat((keys, entries[self.selected.clamp_min(-1)]), dim=1)
            seen = torch.cat((seen, self.selected >= 0), dim=1)
        keys = keys.masked_fill(~seen.unsqueeze(-1), 0)
        return self.tiles(lambda q, k, s: sink_attention(q, k, s, sink), queries, keys, seen)


@torch.no_grad()
def literal(
    model: Any,
    ids: torch.Tensor,
    *,
    start: int = 0,
    hit: int = 0,
    kept: int = 0,
    cached: Entries | None = None,
) -> tuple[torch.Tensor, Entries]:
    """Hidden states of rows ``start`` to the end, of which those before ``kept`` mean nothing; entries."""
    sequence = Literal(model, ids, start=start, hit=hit, kept=kept, cached=cached or {})
    return model(ids[start:], sequence), sequence.entries
