"""What each query of a training batch attends to, and the loss from which the indexer learns it.

Selection has no gradient. As in DeepSeek's sparse attention, the indexer is trained to give the distribution
that attention itself has over the entries (a Kullback-Leibler loss with everything detached but the indexer's
own parameters), first while attention is dense, then with its selection in force. The target here is the sum
over all layers that use a selection, and over all entries that a query may see, also those that were not
selected. It is taken for every `STRIDE`-th query, because it needs the scores that attention never keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vllm_deepinfer.checkpoint.config import LayerPlan, TextConfig

from ..model.selection import Candidates

STRIDE = 8
"""Of so many queries one takes part in the indexer's loss; a training length is a multiple of it."""
_LEAST = 0.05
"""A query's weight is the attention that it spends on entries, but no less than this."""


@dataclass
class Selected:
    """One index source's selection in a batch, and what its loss needs.

    Attributes:
        seen: [batch, length, width] bool, the entries that queries attend to.
        visible: [length, width] bool, those that they might have attended to.
        scores: [batch, rows, width], index scores of every `STRIDE`-th query, differentiable.
        target: [batch, rows, width], attention of the layers so far, summed over heads.
        shares: How many heads ``target`` sums up.
    """

    seen: torch.Tensor
    visible: torch.Tensor
    scores: torch.Tensor
    target: torch.Tensor
    shares: int = field(default=0)

    def watch(self, query: torch.Tensor, entries: torch.Tensor, total: torch.Tensor, first: int) -> None:
        """Add a layer's attention.

        Args:
            query: [batch, length, heads, d]. entries: [batch, width, d].
            total: [batch, length, heads], logs of the denominators.
            first: As of `Selector`.
        """
        with torch.no_grad():
            rows = query[:, first::STRIDE]
            scores = torch.einsum("brhd,bwd->brhw", rows, entries).float() * query.shape[-1] ** -0.5
            # Entries outside the selection are no part of the denominator, so their share may exceed 1.
            shares = (scores - total[:, first::STRIDE].unsqueeze(-1)).clamp_max(0).exp()
            hidden = ~self.visible[first::STRIDE].unsqueeze(1)
            self.target += shares.masked_fill(hidden, 0).sum(2)
            self.shares += query.shape[2]

    def loss(self, first: int) -> torch.Tensor:
        """Mean Kullback-Leibler divergence in nats, weighted by the attention that went to entries."""
        visible = self.visible[first::STRIDE]
        mass = self.target.sum(-1)
        weight = (mass / max(self.shares, 1)).clamp(_LEAST, 1) * visible.any(-1)
        target = self.target / mass.unsqueeze(-1).clamp_min(1e-9)
        logs = self.scores.masked_fill(~visible, -1e9).log_softmax(-1)
        divergence = (target * (target.clamp_min(1e-9).log() - logs)).sum(-1)
        return (divergence * weight).sum() / weight.sum().clamp_min(1e-9)


class Selector:
    """Selects for one batch, with candidates as `model.whole.WholeSequences` keeps them.

    Args:
        sparse: Whether the selection is in force; if not, queries attend to all that is visible.
        first: The first query that takes part in the indexer's loss, below `STRIDE`.
    """

    def __init__(self, config: TextConfig, length: int, *, sparse: bool, first: int) -> None:
        self.config, self.length, self.sparse, self.first = config, length, sparse, first
        self._filter = Candidates(config.candidate_topk_blocks, config.candidate_block_size)
        self._allowed: torch.Tensor | None = None

    def visible(self, ratio: int, device: torch.device) -> torch.Tensor:
        """[length, width] bool: entries that are complete at each token."""
        counts = (torch.arange(self.length, device=device) + 1) // ratio
        return torch.arange(self.length // ratio, device=device) < counts.unsqueeze(1)

    def select(
        self, plan: LayerPlan, queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor
    ) -> Selected:
        """Choose entries from index queries [batch, length, heads, d], weights and keys [batch, width, d]."""
        visible = self.visible(plan.ratio, keys.device)
        rows = slice(self.first, None, STRIDE)
        scores = index_scores(queries[:, rows], weights[:, rows], keys)
        target = torch.zeros_like(scores)
        seen = visible.unsqueeze(0)
        if self.sparse and (keys.shape[1] > self.config.index_topk or plan.is_candidate_source):
            with torch.no_grad():
                seen = self._choose(plan, index_scores(queries, weights, keys), visible)
        return Selected(seen, visible, scores, target)

    def _choose(self, plan: LayerPlan, scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        batch, length, width = scores.shape
        flat = scores.masked_fill(~visible, -torch.inf).flatten(0, 1)
        if plan.is_candidate_source:
            counts = visible.sum(-1).repeat(batch)
            self._allowed = self._filter.choose(flat, counts)
        elif plan.uses_candidates and self._allowed is not None:
            flat = self._filter.keep(flat, self._allowed)
        seen = flat > -torch.inf
        if width > self.config.index_topk:
            best = flat.topk(self.config.index_topk, dim=-1, sorted=False).indices
            seen = torch.zeros_like(seen).scatter_(1, best, True) & seen
        return seen.view(batch, length, width)


def index_scores(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[batch, length, width] float32: Σ over heads of weight × relu(query · key), as `model.indexer`."""
    batch, length, heads, _ = queries.shape
    products = torch.bmm(queries.reshape(batch, length * heads, -1), keys.transpose(1, 2))
    summed = (products.view(batch, length, heads, -1).relu() * weights.unsqueeze(-1)).sum(2)
    return summed.float()
