"""The plain form: whole sequences, no cache, differentiable; the readable reference of the paged form."""

from __future__ import annotations

import torch

from vllm_deepinfer.checkpoint.config import LayerPlan, TextConfig

from .attention import dense_attention
from .indexer import index_scores
from .selection import Candidates, selection_mask, top_positions
from .sequence import Sequence, Store
from .tiles import RowTiles


class WholeSequences(Sequence):
    """A batch of equally long sequences from position 0 on.

    Args:
        batch: Number of sequences.
        length: Tokens of each; row i of the flat form is token i % length of sequence i // length.
    """

    def __init__(
        self,
        config: TextConfig,
        batch: int,
        length: int,
        device: torch.device,
        image: torch.Tensor | None = None,
    ) -> None:
        super().__init__(config, torch.arange(length, device=device).repeat(batch), RowTiles(), image)
        self.batch, self.length = batch, length
        self._rows: dict[tuple[Store, int], torch.Tensor] = {}
        self._entries: dict[int, torch.Tensor] = {}
        self._selected: torch.Tensor | None = None
        self._candidates: torch.Tensor | None = None

    def put(self, store: Store, layer: int, rows: torch.Tensor) -> None:
        self._rows[store, layer] = rows

    def history(self, store: Store, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        back = torch.arange(count - 1, -1, -1, device=self.positions.device)
        known = self.positions.unsqueeze(-1) >= back
        index = torch.arange(len(self.positions), device=self.positions.device).unsqueeze(-1) - back
        return self._rows[store, layer][index.clamp_min(0)], known

    def put_entries(self, plan: LayerPlan, entries: torch.Tensor) -> None:
        complete = self.length // plan.ratio * plan.ratio
        grouped = entries.unflatten(0, (self.batch, self.length))
        self._entries[plan.index] = grouped[:, plan.ratio - 1 : complete : plan.ratio]

    def select(self, plan: LayerPlan, queries: torch.Tensor, weights: torch.Tensor) -> None:
        assert plan.kv_source is not None
        keys = self._entries[plan.kv_source][..., self.config.head_dim :]
        scores = torch.cat([self._scores(row, queries, weights, keys[row]) for row in range(self.batch)])
        visible = self.visible(plan.ratio)
        beyond = torch.arange(keys.shape[1], device=keys.device) >= visible.unsqueeze(-1)
        scores = scores.masked_fill(beyond, -torch.inf)
        filter_ = Candidates(self.config.candidate_topk_blocks, self.config.candidate_block_size)
        if plan.is_candidate_source:
            self._candidates = filter_.choose(scores, visible)
        elif plan.uses_candidates and self._candidates is not None:
            scores = filter_.keep(scores, self._candidates)
        self._selected = top_positions(scores, self.config.index_topk, by_position=False)

    @torch.no_grad()
    def _scores(
        self, row: int, queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        part = slice(row * self.length, (row + 1) * self.length)
        return index_scores(queries[part], weights[part], keys).float()

    def attend(self, plan: LayerPlan, queries: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        window = self._rows[Store.WINDOW, plan.index].unflatten(0, (self.batch, self.length))
        places = torch.arange(self.length, device=window.device)
        back = places.unsqueeze(1) - places
        near = (back >= 0) & (back < self.config.sliding_window)
        outputs = []
        for row, query in enumerate(queries.unflatten(0, (self.batch, self.length))):
            keys, seen = window[row], near
            if plan.kv_source is not None:
                entries = self._entries[plan.kv_source][row, :, : self.config.head_dim]
                keys = torch.cat((keys, entries))
                seen = torch.cat((near, self._chosen(row, len(entries))), dim=1)
            outputs.append(dense_attention(query, keys, seen, sink))
        return torch.cat(outputs)

    def _chosen(self, row: int, width: int) -> torch.Tensor:
        """[length, width] bool: which entries the queries of one sequence selected."""
        assert self._selected is not None
        return selection_mask(self._selected[row * self.length : (row + 1) * self.length], width)
