"""The indexer: which compressed positions a query attends to."""

from __future__ import annotations

import torch

from vllm_deepinfer.checkpoint.config import LayerPlan, TextConfig

from .cached import cached_row
from .compressor import IndexKeys
from .layers import Linear


class Indexer(IndexKeys):
    """Index queries of an index source; a KV source makes the index keys too."""

    def __init__(self, config: TextConfig, plan: LayerPlan, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        if not plan.owns_kv:
            del self.wk, self.k_norm
        self.heads, self.size = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.size, dtype)
        self.weights_proj = Linear(config.hidden_size, self.heads, dtype)

    def queries(
        self, x: torch.Tensor, latent: torch.Tensor, rotations: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Index queries [tokens, heads, index_head_dim] and head weights [tokens, heads].

        Args:
            x: [tokens, hidden], the normalised sub-layer input.
            latent: [tokens, q_lora_rank], the normalised query latent.
        """
        queries = self.wq_b(latent).unflatten(-1, (self.heads, self.size))
        weights = self.weights_proj(x) * (self.size**-0.5 * self.heads**-0.5)
        return cached_row(queries, rotations, "mxfp4"), weights


def index_scores(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Scores [tokens, width]: Σ over heads of weight × relu(query · key).

    Args:
        queries: [tokens, heads, index_head_dim].
        weights: [tokens, heads].
        keys: [width, index_head_dim] shared by all tokens, or [tokens, width, index_head_dim].
    """
    keys = keys.to(queries.dtype)
    if keys.ndim == 2:
        products = (queries.flatten(0, 1) @ keys.T).unflatten(0, queries.shape[:2])
    else:
        products = torch.bmm(queries, keys.transpose(1, 2))
    if torch.is_grad_enabled():
        return (products.relu() * weights.unsqueeze(-1)).sum(dim=1)
    return products.relu_().mul_(weights.unsqueeze(-1)).sum(dim=1)
