"""CSA2 attention: a window of the layer's own keys beside selected entries of a shared compressed cache.

The module holds the projections, row by row. Where keys lie and which are seen is the sequence's part
(`sequence.Sequence`), so that the whole-sequence form and the paged form run the same code here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from vllm_deepinfer.checkpoint.config import LayerPlan, TextConfig

from .cached import cached_row
from .compressor import Compressor
from .indexer import Indexer
from .layers import GroupedLinear, Linear, RMSNorm
from .rope import rotate


class Projected(NamedTuple):
    """What one token brings to attention.

    Attributes:
        query: [tokens, heads, head_dim], rotated.
        window: [tokens, head_dim], its own window KV, rotated and FP8-rounded.
        raw: [tokens, channels], its part of a compressed entry, or None where the layer has no compressor.
        index_query: [tokens, index heads, index_head_dim], or None where the layer does not select.
        index_weight: [tokens, index heads], or None.
    """

    query: torch.Tensor
    window: torch.Tensor
    raw: torch.Tensor | None
    index_query: torch.Tensor | None
    index_weight: torch.Tensor | None


class Attention(nn.Module):
    """The projections of one layer, under their released names."""

    def __init__(self, config: TextConfig, plan: LayerPlan, dtype: torch.dtype) -> None:
        super().__init__()
        heads, size, hidden = config.num_attention_heads, config.head_dim, config.hidden_size
        self.plan, self.heads, self.size = plan, heads, size
        self.wq_a = Linear(hidden, config.q_lora_rank, dtype)
        self.q_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps, dtype)
        self.wq_b = Linear(config.q_lora_rank, heads * size, dtype)
        self.wkv = Linear(hidden, size, dtype)
        self.kv_norm = RMSNorm(size, config.rms_norm_eps, dtype)
        self.wo_a = GroupedLinear(heads * size // config.o_groups, config.o_lora_rank, config.o_groups, dtype)
        self.wo_b = Linear(config.o_groups * config.o_lora_rank, hidden, dtype)
        self.attn_sink = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        self.compressor = Compressor(config, plan.ratio, dtype) if plan.owns_kv else None
        self.indexer = Indexer(config, plan, dtype) if plan.owns_index else None

    def project(self, x: torch.Tensor, rotations: torch.Tensor) -> Projected:
        """Queries, window KV and index queries of tokens [tokens, hidden] at rotations [tokens, pairs]."""
        latent = self.q_norm(self.wq_a(x))
        query = rotate(self.wq_b(latent).unflatten(-1, (self.heads, self.size)), rotations, in_place=True)
        window, raw = self.keys(x, rotations)
        if self.indexer is None:
            return Projected(query, window, raw, None, None)
        return Projected(query, window, raw, *self.indexer.queries(x, latent, rotations))

    def keys(self, x: torch.Tensor, rotations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What tokens [tokens, hidden] leave behind: ``window`` and ``raw`` of `Projected`."""
        window = cached_row(self.wkv(x), rotations, "fp8", self.kv_norm)
        return window, None if self.compressor is None else self.compressor.project(x)

    def entry(self, group: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """The compressed entry that ends at each token: [tokens, head_dim + index_head_dim].

        Args:
            group: [tokens, ratio, channels], the ``raw`` rows of each token's group, itself last. Rows whose
                group is not complete give an entry that nobody may read.
            rotations: [tokens, pairs] at the group's first position.
        """
        assert self.compressor is not None and self.indexer is not None
        latent = self.compressor.pool(group)
        compressed = cached_row(latent, rotations, "nvfp4")
        return torch.cat((compressed, self.indexer.keys(latent, rotations)), dim=-1)

    def output(self, attended: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """Undo the rotation on [tokens, heads, head_dim] and project to [tokens, hidden]."""
        projected: torch.Tensor = self.wo_b(
            self.wo_a(rotate(attended, rotations, inverse=True, in_place=True).flatten(1))
        )
        return projected


def sink_attention(
    query: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, sink: torch.Tensor
) -> torch.Tensor:
    """Softmax attention with a learned extra logit per head in the denominator; the keys are the values.

    Args:
        query: [tokens, heads, head_dim].
        keys: [tokens, slots, head_dim].
        seen: [tokens, slots] bool.
        sink: [heads], float32.

    Returns:
        [tokens, heads, head_dim] in the query's dtype.
    """
    if _can_flash(query):
        rows = query.unsqueeze(1)
        mask = seen.view(len(seen), 1, 1, -1).expand(-1, -1, query.shape[1], -1)
        attended, sums = _flash(rows, keys.to(query.dtype).unsqueeze(1), mask)
        return _with_sink(attended[:, 0], sums[:, 0], sink)
    keys = keys.float()
    logits = torch.bmm(query.float(), keys.transpose(1, 2)) * query.shape[-1] ** -0.5
    logits = logits.masked_fill(~seen.unsqueeze(1), -torch.inf)
    column = sink.view(1, -1, 1).expand(len(query), -1, 1)
    weights = torch.cat((logits, column), dim=-1).softmax(dim=-1)[..., :-1]
    return torch.bmm(weights, keys).to(query.dtype)


def dense_attention(
    query: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, sink: torch.Tensor
) -> torch.Tensor:
    """`sink_attention` of tokens that share their keys: one product instead of a gather per token.

    Args:
        query: [tokens, heads, head_dim].
        keys: [slots, head_dim].
        seen: [tokens, slots] bool.
        sink: [heads], float32.
    """
    if _can_flash(query):
        rows, shared = (
            query.transpose(0, 1).unsqueeze(0),
            keys.to(query.dtype).expand(1, query.shape[1], -1, -1),
        )
        attended, sums = _flash(rows, shared, seen.expand(1, 1, -1, -1))
        return _with_sink(attended[0].transpose(0, 1), sums[0].T, sink)
    # The sink is one more key, all zero, whose logit is the sink itself.
    keys = torch.cat((keys, keys.new_zeros(1, keys.shape[1]))).float()
    logits = torch.einsum("shd,td->hst", query.float(), keys) * query.shape[-1] ** -0.5
    hidden = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, -torch.inf)
    columns = sink.view(-1, 1, 1).expand(-1, len(query), 1)
    bias = torch.cat((hidden.expand(len(sink), -1, -1), columns), dim=-1)
    return torch.einsum("hst,td->shd", (logits + bias).softmax(dim=-1), keys).to(query.dtype)


def _can_flash(query: torch.Tensor) -> bool:
    return query.dtype == torch.bfloat16 and query.device.type == "cpu" and not torch.is_grad_enabled()


def _flash(query: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's blocked CPU attention, whose scores stay in float32; keys are values, without the sink.

    Args:
        query: [batch, heads, rows, head_dim].
        keys: [batch, heads, slots, head_dim].
        seen: [batch, 1 or heads, rows, slots] bool.

    Returns:
        [batch, heads, rows, head_dim] and the log of the sums of exponentials, [batch, heads, rows] float32.
    """
    mask = torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, -torch.inf)
    attended, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, keys, 0.0, False, attn_mask=mask, scale=query.shape[-1] ** -0.5
    )
    return attended, sums


def _with_sink(attended: torch.Tensor, sums: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """Put the sink into the denominator afterwards: a factor e^sum / (e^sum + e^sink) per row and head."""
    return (attended * torch.sigmoid(sums - sink).unsqueeze(-1)).to(attended.dtype)
