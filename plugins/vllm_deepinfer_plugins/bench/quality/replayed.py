"""The plain form of bounded replay: window KV that begins late, over entries that are cached.

What the engine does by pages (`replay/README.md`), for measuring what it costs a model that has learnt
something. A query of a token sees window keys from the replay's first token on; entries of tokens in front of
the hit are those of the sequence that was served before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_deepinfer.checkpoint.config import LayerPlan

from ...model.attention import dense_attention
from ...model.backbone import Backbone
from ...model.sequence import Store
from ...model.whole import WholeSequences

Entries = dict[int, torch.Tensor]


@dataclass(frozen=True)
class Cut:
    """Where things begin.

    Attributes:
        start: the first token that is computed.
        hit: tokens whose entries are cached; a multiple of every ratio.
        kept: the first token that goes behind the last KV source.
    """

    start: int = 0
    hit: int = 0
    kept: int = 0


class Replayed(WholeSequences):
    """Tokens ``cut.start`` to the end of one sequence.

    Args:
        ids: [length], the whole sequence's.
        cached: by KV source, entries [1, count, channels] of the tokens before the hit.
    """

    def __init__(self, model: Backbone, ids: torch.Tensor, cut: Cut, cached: Entries) -> None:
        super().__init__(model.config, 1, len(ids) - cut.start, ids.device)
        self.positions = torch.arange(cut.start, len(ids), device=ids.device)
        self.ids, self.cut, self.cached = ids, cut, cached
        self.last_source = model.last_source

    @property
    def entries(self) -> Entries:
        """By KV source, what this pass left and what it adopted: [1, count, channels]."""
        return self._entries

    def history(self, store: Store, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        if store is not Store.IDS:
            return super().history(store, layer, count)
        at = self.positions.unsqueeze(-1) - torch.arange(count - 1, -1, -1, device=self.ids.device)
        rows = self.ids.to(torch.int32).unsqueeze(-1)[at.clamp_min(0)]
        return rows, at >= 0

    def put_entries(self, plan: LayerPlan, entries: torch.Tensor) -> None:
        completes = (self.positions >= self.cut.hit) & ((self.positions + 1) % plan.ratio == 0)
        own = entries[completes].unsqueeze(0)
        if self.cut.hit:
            own = torch.cat((self.cached[plan.index][:, : self.cut.hit // plan.ratio], own), dim=1)
        self._entries[plan.index] = own

    def attend(self, plan: LayerPlan, queries: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        keys = self._rows[Store.WINDOW, plan.index]
        behind = self.last_source is not None and plan.index > self.last_source
        floor = max(self.cut.start, self.cut.kept) if behind else self.cut.start
        back = self.positions.unsqueeze(1) - self.positions
        seen = (back >= 0) & (back < self.config.sliding_window)
        seen &= (self.positions >= floor) | (back == 0)  # rows in front of the floor are computed for nobody
        if plan.kv_source is not None:
            entries = self._entries[plan.kv_source][0, :, : self.config.head_dim]
            keys = torch.cat((keys, entries))
            seen = torch.cat((seen, self._chosen(0, len(entries))), dim=1)
        return dense_attention(queries, keys, seen, sink)


@torch.no_grad()
def replayed(model: Backbone, ids: torch.Tensor, cut: Cut, cached: Entries) -> tuple[torch.Tensor, Entries]:
    """Logits [length − start, vocab] of the rows from ``cut.start`` on, and the entries.

    Rows in front of ``cut.kept`` mean nothing.
    """
    sequence = Replayed(model, ids, cut, cached)
    return model.logits(model(ids[cut.start :], sequence)), sequence.entries
