"""Engram: n-grams of compressed token ids read rows of a large table, gated into the residual streams.

The compressed id of a token is the id of its normalised text (NFKC, lower case, no accents); the tables,
primes and multipliers come from `vllm_deepinfer.checkpoint.engram`. A lookup needs the ids of the
``engram_max_ngram_size − 1`` preceding tokens: in the engine they come from a paged cache of token ids, so
they survive chunks, steps and prefix hits (technical report; vLLM ``models/deepseek_v41/common/engram.py``).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from vllm_deepinfer.checkpoint.config import TextConfig
from vllm_deepinfer.checkpoint.engram import EngramHash

from ..kernels import active
from .layers import Linear


class NgramRows(nn.Module):
    """Hashes token ids to table rows for all Engram layers at once."""

    def __init__(self, hashes: EngramHash) -> None:
        super().__init__()
        self.pad_id = int(hashes.pad_id)
        for name in ("token_map", "primes", "offsets", "multipliers"):
            # The plain int64 arrays are no weights: they are rebuilt from the config and the tokenizer.
            self.register_buffer(name, torch.as_tensor(getattr(hashes, name)), persistent=False)
        self.token_map: torch.Tensor
        self.primes: torch.Tensor
        self.offsets: torch.Tensor
        self.multipliers: torch.Tensor

    @property
    def depth(self) -> int:
        """Tokens of the longest n-gram."""
        return int(self.multipliers.shape[1])

    def forward(self, ids: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """Table rows of each token's n-grams.

        Args:
            ids: [tokens, depth], each token's history with itself last.
            known: [tokens, depth], False where the sequence had not begun (or an n-gram must not reach).

        Returns:
            [tokens, Engram layers, (depth − 1) × heads] row numbers, 2-grams first.
        """
        known = known.flip(1).cumprod(dim=1).bool()
        ids = self.token_map[ids.flip(1).long().clamp(0, len(self.token_map) - 1)]
        ids = torch.where(known, ids, self.pad_id)
        products = ids.unsqueeze(1) * self.multipliers
        heads = self.primes.shape[1] // (self.depth - 1)
        rolling, rows = products[..., 0], []
        for reach in range(1, self.depth):
            rolling = rolling ^ products[..., reach]
            buckets = self.primes[:, (reach - 1) * heads : reach * heads]
            rows.append(rolling.unsqueeze(-1) % buckets)
        return torch.cat(rows, dim=-1) + self.offsets


class Engram(nn.Module):
    """Adds the gated memory read to every residual stream.

    Args:
        config: The language model's config.
        table: Which of ``engram_layer_ids`` this is.
    """

    def __init__(self, config: TextConfig, table: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.streams, self.hidden, self.eps = config.hc_mult, config.hidden_size, config.rms_norm_eps
        heads = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        self.embed = nn.Embedding(config.engram_num_embeddings[table], config.engram_head_dim, dtype=dtype)
        self.wkv = Linear(heads * config.engram_head_dim, self.hidden * (self.streams + 1), dtype)
        self.q_weight = nn.Parameter(torch.ones(self.streams, self.hidden, dtype=dtype))
        self.k_weight = nn.Parameter(torch.ones(self.streams, self.hidden, dtype=dtype))

    def forward(self, streams: torch.Tensor, rows: torch.Tensor, closed: torch.Tensor | None) -> torch.Tensor:
        """Streams [tokens, n, hidden] with the memory added.

        Args:
            rows: [tokens, heads] from `NgramRows`, this layer's part.
            closed: [tokens] bool, True where nothing is added (image positions), or None.
        """
        memory = self.wkv(F.embedding(rows, self.embed.weight).flatten(1))
        kernels = active(streams)
        if kernels is not None and closed is None:
            return kernels.engram(streams, memory, self.q_weight, self.k_weight, self.eps)
        key = memory[:, : -self.hidden].float().unflatten(1, (self.streams, self.hidden))
        value, wide = memory[:, -self.hidden :].float(), streams.float()
        weight = self.q_weight.float() * self.k_weight.float()
        scale = torch.rsqrt(wide.square().mean(-1) + self.eps) * torch.rsqrt(key.square().mean(-1) + self.eps)
        match = (wide * weight * key).sum(-1) * scale * self.hidden**-0.5
        gate = torch.sigmoid(torch.copysign(match.abs().clamp_min(1e-6).sqrt(), match))
        if closed is not None:
            gate = gate.masked_fill(closed.unsqueeze(-1), 0)
        return (wide + gate.unsqueeze(-1) * value.unsqueeze(1)).to(streams.dtype)
