"""A backbone begins with the means to look up what came behind an earlier occurrence of a token.

Looking up (an induction head: Olsson et al., 2022) is two steps that are worth nothing one without the other,
so that chance is slow to make both, and an hour on two cores has no more than eight million tokens. Hence
both are given, roughly, and training has the rest to do:

- a head of the first layer attends to the token before, and writes what it was beside the token itself;
- entries of the compressed caches, and window keys of the layers that read them, hold the token before in
  their first channels and the token itself in the next; a head of these layers asks for entries whose token
  before is this token, and writes their own token where the head of the model reads it.

Residual channels are laid out for that: token, a constant, token before, free.
"""

from __future__ import annotations

import torch

from vllm_deepinfer.checkpoint.config import TextConfig

from ..model.attention import Attention
from ..model.backbone import Backbone
from ..model.rope import Rotary

_EMBEDDING, _HEAD, _CONSTANT = 0.5, 0.1, 3.0
"""Size of an embedding's and of the head's channels, and the channel that is the same for all tokens."""
_PAIRS = 3
"""Rotary pairs, the fastest ones, that tell the token before from its neighbours."""
_BEFORE_LOGIT, _MATCH_LOGIT = 24.0, 16.0
"""Of the token before, and of an entry that matches exactly."""
_WRITTEN, _ANSWERED = 0.75, 1.5
"""How strongly the two heads write into the residual."""


class _Layout:
    """Channels of the residual and of a key."""

    def __init__(self, config: TextConfig) -> None:
        hidden, self.plain = config.hidden_size, config.head_dim - config.qk_rope_head_dim
        self.token = slice(0, hidden * 3 // 5)
        self.constant = self.token.stop
        first = self.constant + 1
        self.before = slice(first, min(hidden, first + min(self.plain, config.o_lora_rank)))
        half = min(self.plain // 2, self.before.stop - self.before.start, config.q_lora_rank)
        self.asked, self.own = slice(0, half), slice(half, 2 * half)
        square = self.constant * _EMBEDDING**2 + _CONSTANT**2
        self.norm = (hidden / square) ** 0.5  # what the first layer's norm multiplies by
        self.half, self.size, self.pairs = half, config.head_dim, min(_PAIRS, config.qk_rope_head_dim // 2)


@torch.no_grad()
def begin_lookup(model: Backbone, generator: torch.Generator) -> None:
    """Set embedding, head, one head of the first layer, and one of the source with an entry per token."""
    layout = _Layout(model.config)
    width = layout.token.stop
    rotation = _orthogonal(width, generator)
    embedding = model.embed.weight
    embedding.zero_()
    embedding[:, layout.token].normal_(std=_EMBEDDING, generator=generator)
    # To repeat a token that was found is one map for all tokens, and no token predicts itself at first.
    model.head.weight[:, layout.token] = embedding[:, layout.token] @ rotation * (_HEAD / _EMBEDDING)
    embedding[:, layout.constant] = _CONSTANT
    basis = _orthogonal(width, generator)  # rows: what a key holds of a token
    written = layout.before.stop - layout.before.start
    _look_back(model.layers[0].attn, layout, basis[:written], Rotary(model.config, compressed=False))
    answers = basis[-layout.half :]
    for layer in model.layers:
        source = layer.plan.kv_source
        if source is None:
            continue
        compressor = model.layers[source].attn.compressor
        assert compressor is not None
        if layer.plan.owns_kv and layer.plan.ratio == 1:
            _hold(compressor.wkv.weight, layout, answers)
            _ask(layer.attn, layout, basis[: layout.half], answers @ rotation)
        layer.attn.wkv.weight.copy_(compressor.wkv.weight)  # so that one query fits both


def _look_back(attn: Attention, layout: _Layout, basis: torch.Tensor, rotary: Rotary) -> None:
    """Head 0 attends to the token before and writes it, in ``basis`` [before channels, token channels]."""
    count, plain = len(basis), layout.plain
    back = rotary(torch.ones(1, dtype=torch.long))[0]
    keys, queries = attn.wkv.weight, attn.wq_b.weight[: layout.size]
    keys.zero_()
    keys[:count, layout.token] = basis / _EMBEDDING  # content: about 1 per channel behind the norm
    strength = (count / (2 * layout.pairs)) ** 0.5  # a third of the key's square is its place
    attn.wq_a.weight[0] = 0
    attn.wq_a.weight[0, layout.constant] = 1 / (_CONSTANT * layout.norm)
    queries.zero_()
    # The logit of the token before is query · key / √size; `length` is a pair's share of the key's norm.
    length = (layout.size / 3 / layout.pairs) ** 0.5
    for pair in range(layout.pairs):
        place = plain + 2 * pair
        keys[place, layout.constant] = strength / _CONSTANT
        wanted = _BEFORE_LOGIT / layout.pairs * layout.size**0.5 / length
        queries[place, 0], queries[place + 1, 0] = wanted * back[pair].real, -wanted * back[pair].imag
    _write(attn, slice(0, count), layout.before.start, torch.eye(count) * _WRITTEN)


def _hold(keys: torch.Tensor, layout: _Layout, answers: torch.Tensor) -> None:
    """A key holds the token before, then the token, and no place."""
    keys.zero_()
    first = layout.before.start
    keys[layout.asked, first : first + layout.half] = torch.eye(layout.half)
    keys[layout.own, layout.token] = answers / _EMBEDDING


def _ask(attn: Attention, layout: _Layout, basis: torch.Tensor, answers: torch.Tensor) -> None:
    """Head 0 asks for keys whose token before is this token, and writes their own token for the head."""
    half = layout.half
    attn.wq_a.weight[:half] = 0
    attn.wq_a.weight[:half, layout.token] = basis / _EMBEDDING
    queries = attn.wq_b.weight[: layout.size]
    queries.zero_()
    length = (layout.size / 2) ** 0.5  # half of the key's square
    queries[:half, :half] = torch.eye(half) * (_MATCH_LOGIT * layout.size**0.5 / length / half**0.5)
    _write(attn, layout.own, layout.token.start, answers * _ANSWERED)


def _write(attn: Attention, channels: slice, first: int, map_: torch.Tensor) -> None:
    """Head 0's channels go through ``map_`` [channels, written] to the residual from ``first`` on."""
    count = channels.stop - channels.start
    attn.wo_a.weight[:count] = 0
    attn.wo_a.weight[:count, channels] = torch.eye(count)
    attn.wo_b.weight[first : first + map_.shape[1], :count] = map_.T


def _orthogonal(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=generator))[0]
