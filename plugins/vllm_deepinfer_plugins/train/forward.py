"""One training pass of the backbone over a batch of sequences, in the rows and attention of this package.

The parameters are those of a `model.backbone.Backbone` in float32; ``dtype`` is what activations and
products have. Cache rounding is in it with the gradient passed straight through, as in the plain form: the
model learns with the caches that it will have. tests/plugins/train/test_forward.py holds it to the plain
form.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from ..kernels import suspended
from ..model.attention import Attention
from ..model.backbone import Backbone
from ..model.block import Block
from ..model.cached import cached_row
from ..model.engram import Engram
from ..model.rope import Rotary
from .attention import attend, window_seen
from .indexing import STRIDE, Selected, Selector
from .rows import (
    Sizes,
    collapse,
    enter,
    expert_parts,
    hyper_parts,
    leave,
    linear,
    memory,
    norm,
    query_parts,
)


@dataclass
class Turns:
    """Rotations of every token of a batch, [tokens, pairs]: complex, and their real parts."""

    complex: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def at(cls, rotary: Rotary, positions: torch.Tensor) -> Turns:
        """The rotations at positions [tokens]."""
        turns = rotary(positions)
        return cls(turns, turns.real.contiguous(), turns.imag.contiguous())


@dataclass
class Passed:
    """What a training pass yields.

    Attributes:
        hidden: [tokens, hidden], normalised.
        loads: Tokens of each expert, [experts] float32, in the order of the layers.
        divergences: The indexer's loss of each index source.
        taps: Mean over the streams of the inputs of the layers that were asked for, [tokens, hidden] each.
    """

    hidden: torch.Tensor
    loads: list[torch.Tensor] = field(default_factory=list)
    divergences: list[torch.Tensor] = field(default_factory=list)
    taps: list[torch.Tensor] = field(default_factory=list)


class Pass:
    """One forward pass over token ids [batch, length].

    Args:
        length: A multiple of the sliding window, of every ratio and of `indexing.STRIDE`.
        sparse: Whether the indexer's selection is in force.
        first: Offset of the queries whose attention the indexer learns from, below `indexing.STRIDE`.
        taps: Layers whose inputs the drafter reads.
    """

    def __init__(
        self,
        model: Backbone,
        ids: torch.Tensor,
        dtype: torch.dtype,
        *,
        sparse: bool,
        first: int = 0,
        taps: tuple[int, ...] = (),
    ) -> None:
        self.model, self.config, self.ids, self.dtype, self.taps = model, model.config, ids, dtype, taps
        self.batch, self.length = ids.shape
        self.sizes = Sizes.of(self.config)
        self.near = window_seen(self.length, self.config.sliding_window, ids.device)
        self.first = first % STRIDE
        self.selector = Selector(self.config, self.length, sparse=sparse, first=self.first)
        self.selected: Selected | None = None
        self._sources: list[Selected] = []
        self._entries: dict[int, torch.Tensor] = {}
        self._turns: dict[tuple[bool, int], Turns] = {}

    def turns(self, ratio: int, back: int = 0) -> Turns:
        """Rotations for a layer of that ratio, ``back`` tokens before each token."""
        key = (ratio > 0, back)
        if key not in self._turns:
            places = torch.arange(self.length, device=self.ids.device).repeat(self.batch)
            self._turns[key] = Turns.at(
                Rotary(self.config, compressed=ratio > 0), (places - back).clamp_min(0)
            )
        return self._turns[key]

    def run(self) -> Passed:
        """All layers, by PyTorch alone: an engine's kernels take parameters of the activations' dtype."""
        with suspended():
            return self._run()

    def _run(self) -> Passed:
        model, flat = self.model, self.ids.flatten()
        streams = F.embedding(flat, model.embed.weight).to(self.dtype)
        streams = streams.unsqueeze(1).expand(-1, self.config.hc_mult, -1).contiguous()
        pre = torch.zeros(self.config.hc_mult, len(flat), device=flat.device)
        pre[0] = 1
        rows, result = self._engram_rows(), Passed(streams)
        for layer in model.layers:
            if layer.plan.index in self.taps:
                result.taps.append(streams.mean(1))
            streams, pre, load = self._layer(layer, streams, pre, rows)
            result.loads.append(load)
        result.hidden = norm(collapse(streams, pre), model.norm.weight, self.sizes.norm_eps)
        if torch.is_grad_enabled():
            result.divergences = [source.loss(self.first) for source in self._sources]
        return result

    def _layer(
        self, layer: Block, streams: torch.Tensor, pre: torch.Tensor, rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        plan, attn, turns = layer.plan, layer.attn, self.turns(layer.plan.ratio)
        if layer.engram is not None:
            assert rows is not None
            streams = self._read(layer.engram, streams, rows[:, plan.engram])
        *mixed, x, latent, query, raw = enter(
            streams,
            pre,
            hyper_parts(layer.hc_attn),
            layer.attn_norm.weight,
            query_parts(attn),
            turns.cos,
            turns.sin,
            self.sizes,
        )
        if plan.owns_kv:
            self._entries[plan.index] = self._compress(attn, x, plan.ratio)
        if plan.owns_index:
            self._select(layer, x, latent, turns)
        window = cached_row(raw, turns.complex, "fp8", attn.kv_norm)
        attended = self._attend(layer, query, window)
        return leave(
            attended,
            streams,
            (mixed[1], mixed[2], mixed[0]),
            (attn.wo_a.weight, attn.wo_b.weight),
            hyper_parts(layer.hc_ffn),
            layer.ffn_norm.weight,
            expert_parts(layer.ffn),
            turns.cos,
            turns.sin,
            self.sizes,
        )

    def _engram_rows(self) -> torch.Tensor | None:
        ngrams = self.model.ngrams
        if ngrams is None:
            return None
        back = torch.arange(ngrams.depth - 1, -1, -1, device=self.ids.device)
        places = torch.arange(self.length, device=self.ids.device).unsqueeze(-1) - back
        history = self.ids[:, places.clamp_min(0)].flatten(0, 1)
        rows: torch.Tensor = ngrams(history, (places >= 0).repeat(self.batch, 1))
        return rows

    def _read(self, engram: Engram, streams: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        embedded = F.embedding(rows, engram.embed.weight).flatten(1)
        return memory(streams, embedded, engram.wkv.weight, engram.q_weight * engram.k_weight, engram.eps)

    def _compress(self, attn: Attention, x: torch.Tensor, ratio: int) -> torch.Tensor:
        """[batch, width, head_dim + index_head_dim] of a KV source; no gradient leaves the index keys."""
        compressor, indexer = attn.compressor, attn.indexer
        assert compressor is not None and indexer is not None
        turns = self.turns(ratio, ratio - 1).complex[ratio - 1 :: ratio]
        latent = compressor.pool(compressor.project(x.float()).unflatten(0, (-1, ratio)))
        keys = indexer.keys(latent.detach(), turns)
        entries = torch.cat((cached_row(latent, turns, "nvfp4"), keys), dim=-1)
        return entries.to(self.dtype).unflatten(0, (self.batch, -1))

    def _select(self, layer: Block, x: torch.Tensor, latent: torch.Tensor, turns: Turns) -> None:
        indexer, size = layer.attn.indexer, self.config.head_dim
        assert indexer is not None and layer.plan.kv_source is not None
        queries = linear(latent.detach(), indexer.wq_b.weight).unflatten(-1, (indexer.heads, indexer.size))
        queries = cached_row(queries, turns.complex, "mxfp4")
        weights = linear(x.detach(), indexer.weights_proj.weight) * (indexer.size**-0.5 * indexer.heads**-0.5)
        shape = (self.batch, self.length)
        self.selected = self.selector.select(
            layer.plan,
            queries.unflatten(0, shape),
            weights.unflatten(0, shape),
            self._entries[layer.plan.kv_source][..., size:],
        )
        self._sources.append(self.selected)

    def _attend(self, layer: Block, query: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
        shape, sink = (self.batch, self.length), layer.attn.attn_sink
        query, window = query.unflatten(0, shape), window.unflatten(0, shape)
        if layer.plan.kv_source is None:
            attended, _ = attend(query, window, self.near, None, None, sink)
            return attended.flatten(0, 1)
        assert self.selected is not None
        entries = self._entries[layer.plan.kv_source][..., : self.config.head_dim].contiguous()
        attended, total = attend(query, window, self.near, entries, self.selected.seen, sink)
        if torch.is_grad_enabled():
            self.selected.watch(query, entries, total, self.first)
        return attended.flatten(0, 1)
