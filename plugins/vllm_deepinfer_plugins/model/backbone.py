"""The language model: embedding, layers, final norm and head, and its plain form over whole sequences."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from vllm_deepinfer.checkpoint.config import TextConfig
from vllm_deepinfer.checkpoint.engram import EngramHash

from .block import Block
from .engram import NgramRows
from .layers import Linear, RMSNorm
from .mhc import collapse
from .sequence import Sequence, Store
from .whole import WholeSequences


class Backbone(nn.Module):
    """DeepSeek-V4.1 without vision tower and drafter, parameters under their released names.

    Args:
        config: The language model's config.
        hashes: Engram's token map and primes; needed when the config has Engram layers.
        dtype: bfloat16 or float32. Mixing coefficients, router, sinks, pooling and head are always float32.
    """

    def __init__(
        self, config: TextConfig, hashes: EngramHash | None, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(Block(config, plan, dtype) for plan in config.schedule())
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.head = Linear(config.hidden_size, config.vocab_size, torch.float32)
        needs_ids = any(plan.engram is not None for plan in config.schedule())
        if needs_ids and hashes is None:
            raise ValueError("engram_layer_ids is not empty, so the model needs the tokenizer's EngramHash")
        self.ngrams = NgramRows(hashes) if needs_ids and hashes is not None else None
        self.last_source = max((plan.index for plan in config.schedule() if plan.owns_kv), default=None)
        self.tap: Callable[[int, torch.Tensor, Sequence], None] | None = None
        """Called with each layer's number and input streams [tokens, n, hidden], for a drafter."""

    def forward(self, ids: torch.Tensor, sequence: Sequence) -> torch.Tensor:
        """Normalised hidden states [tokens, hidden] of token ids [tokens]; 0 for rows that are not kept."""
        streams = F.embedding(ids, self.embed.weight).unsqueeze(1).expand(-1, self.config.hc_mult, -1)
        pre = torch.zeros(len(ids), self.config.hc_mult, device=ids.device)
        pre[:, 0] = 1
        rows = self._engram_rows(ids, sequence)
        kept = None if self.last_source is None else sequence.kept()
        for layer in self.layers:
            written = False
            if self.tap is not None:
                self.tap(layer.plan.index, streams, sequence)
            if kept is not None and layer.plan.index == self.last_source:
                # From here on the other rows would be computed for nobody: what they leave is written.
                layer.write(streams, pre, sequence, rows)
                if not len(kept):
                    return streams.new_zeros(len(ids), self.config.hidden_size)
                sequence, streams, pre, written = sequence.narrow(kept), streams[kept], pre[kept], True
                rows = None if rows is None else rows[kept]
            streams, pre = layer(streams, pre, sequence, rows, written)
        hidden: torch.Tensor = sequence.tiles(lambda s, p: self.norm(collapse(s, p)), streams, pre)
        if kept is None:
            return hidden
        return hidden.new_zeros(len(ids), hidden.shape[1]).index_copy_(0, kept, hidden)

    def _engram_rows(self, ids: torch.Tensor, sequence: Sequence) -> torch.Tensor | None:
        if self.ngrams is None:
            return None
        # -1 stands for an image position, through which no n-gram reaches.
        kept = ids if sequence.image is None else ids.masked_fill(sequence.image, -1)
        sequence.put(Store.IDS, 0, kept.to(torch.int32).unsqueeze(-1))
        history, known = sequence.history(Store.IDS, 0, self.ngrams.depth)
        history = history.squeeze(-1)
        rows: torch.Tensor = self.ngrams(history, known & (history >= 0))
        return rows

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [..., vocab] from normalised hidden states [..., hidden]."""
        logits: torch.Tensor = self.head(hidden)
        return logits

    def whole(self, ids: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        """The plain form: logits [batch, length, vocab] of token ids [batch, length], without any cache.

        Args:
            image: [batch, length] bool, True at image positions (their embeddings are the caller's business),
                or None for text alone.
        """
        batch, length = ids.shape
        flat = None if image is None else image.flatten()
        sequence = WholeSequences(self.config, batch, length, ids.device, flat)
        return self.logits(self(ids.flatten(), sequence)).unflatten(0, (batch, length))
