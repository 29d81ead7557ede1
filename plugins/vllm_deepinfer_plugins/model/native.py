"""The paged form with native kernels: selection and attention read keys where they lie in vLLM's blocks.

For bfloat16 on a CPU. `PagedSequence` gathers keys into tensors; here a kernel follows the block table
itself: single rows (decodes) each over their own keys, a prompt chunk over its request's keys packed once. Of
equal index scores the lower position is taken.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vllm_deepinfer.checkpoint.config import LayerPlan, TextConfig

from ..kernels import BLOCK, Filter, Kernels, Paged
from .paged import PagedSequence, Stores
from .sequence import Store
from .stores import PagedMetadata, PagedStore
from .tiles import RowTiles
from .truncation import Truncation


def has_kernels_for(config: TextConfig) -> bool:
    """Whether the attention kernels take a model: channels in multiples of 32."""
    sizes = (config.head_dim, config.index_head_dim)
    return all(size % BLOCK == 0 for size in sizes)


class NativePagedSequence(PagedSequence):
    """One engine step; arguments as of `PagedSequence`."""

    def __init__(
        self,
        config: TextConfig,
        positions: torch.Tensor,
        tiles: RowTiles,
        stores: Stores,
        metadata: Mapping[str, PagedMetadata],
        truncation: Truncation | None = None,
        lookback: torch.Tensor | None = None,
        *,
        kernels: Kernels,
    ) -> None:
        super().__init__(config, positions, tiles, stores, metadata, truncation, lookback)
        self.kernels = kernels
        self._views: dict[str, Paged] = {}
        singles = [span.start for span in self.spans if span.count == 1]
        self._singles: slice | torch.Tensor = (
            slice(None) if len(singles) == len(positions) else torch.tensor(singles, dtype=torch.int64)
        )
        self._any_single = bool(singles)

    def _over(self, positions: torch.Tensor, metadata: Mapping[str, PagedMetadata]) -> NativePagedSequence:
        parts = (self.config, positions, self.tiles, self.stores, metadata, self.truncation)
        return type(self)(*parts, kernels=self.kernels)

    def _view(self, place: PagedStore) -> Paged:
        if place.prefix not in self._views:
            table = self.metadata[place.prefix].block_table
            self._views[place.prefix] = Paged(
                place.rows, table, place.block_size, place.rows_per_block, place.ratio
            )
        return self._views[place.prefix]

    def _select(
        self, plan: LayerPlan, queries: torch.Tensor, weights: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        assert plan.kv_source is not None
        entries = self._view(self.stores.entries[plan.kv_source])
        offset, k = self.config.head_dim, self.config.index_topk
        blocks = self._candidate_blocks(plan, visible)
        chosen, weights = visible.new_empty(len(visible), k), weights.float()
        if self._any_single:
            rows = self._singles
            own = None if blocks is None else blocks[rows].contiguous()
            chosen[rows] = self.kernels.select_rows(
                queries[rows],
                weights[rows],
                self.request[rows],
                visible[rows],
                entries,
                offset,
                self._filter(plan, own),
                k,
            )
            if own is not None and blocks is not None:
                blocks[rows] = own
        for span in self.spans:
            if span.count > 1:
                part = None if blocks is None else self._filter(plan, blocks[span.rows])
                chosen[span.rows] = self.kernels.select_span(
                    queries[span.rows], weights[span.rows], span.begin, span.request, entries, offset, part, k
                )
        if plan.is_candidate_source:
            self._blocks = blocks
        return chosen

    def _candidate_blocks(self, plan: LayerPlan, visible: torch.Tensor) -> torch.Tensor | None:
        """[tokens, blocks] to fill by a candidate source, those to keep inside for its followers, or None."""
        blocks = -(-int(visible.max()) // self.candidates.size)
        if plan.is_candidate_source and blocks <= self.candidates.blocks:
            return None  # all of them are kept, so nobody has to look
        if plan.is_candidate_source:
            return visible.new_empty(len(visible), self.candidates.blocks)
        return self._blocks if plan.uses_candidates else None

    def _filter(self, plan: LayerPlan, blocks: torch.Tensor | None) -> Filter | None:
        if blocks is None:
            return None
        return Filter(blocks, self.candidates.size, plan.is_candidate_source)

    def attend(self, plan: LayerPlan, queries: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        window, reach = self._view(self.stores.tokens[Store.WINDOW, plan.index]), self.config.sliding_window
        entries = None if plan.kv_source is None else self._view(self.stores.entries[plan.kv_source])
        chosen = None if entries is None else self._selected
        floors = self._floors(plan.index)
        if self._any_single:
            rows = self._singles
            own = None if chosen is None else chosen[rows]
            requests = self.request[rows]
            single = self.kernels.attend_rows(
                queries[rows],
                self.positions[rows],
                requests,
                window,
                reach,
                entries,
                own,
                sink,
                floors=None if floors is None else floors[requests],
            )
            if isinstance(rows, slice):
                return single
        outputs = torch.empty_like(queries)
        if self._any_single:
            outputs[self._singles] = single
        for span in self.spans:
            if span.count > 1:
                own = None if chosen is None else chosen[span.rows]
                outputs[span.rows] = self.kernels.attend_span(
                    queries[span.rows],
                    span.begin,
                    span.request,
                    window,
                    reach,
                    entries,
                    own,
                    sink,
                    floor=self._floor(plan.index, span),
                )
        return outputs
