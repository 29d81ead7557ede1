"""Attention of whole sequences for training: a blocked window, a masked compressed cache and the sink.

The plain form computes every pair of tokens for the window. Here a chunk of queries, one window long, meets
the chunk before and its own. Rows stay [batch, length, heads, ...] throughout, so that all products are
batched ones without a transposition, and only the numerators of the softmax are kept for backward.
"""

from __future__ import annotations

from typing import Any

import torch

from .compiled import compiled


def window_seen(length: int, window: int, device: torch.device) -> torch.Tensor:
    """[chunks, window, 1, 2 × window] bool: what queries of a chunk see of the chunk before and their own."""
    places = torch.arange(window, device=device)
    back = places.unsqueeze(1) + window - torch.arange(2 * window, device=device)
    seen = ((back >= 0) & (back < window)).repeat(length // window, 1, 1)
    seen[0, :, :window] = False
    return seen.unsqueeze(2)


def attend(
    query: torch.Tensor,
    window: torch.Tensor,
    near: torch.Tensor,
    entries: torch.Tensor | None,
    seen: torch.Tensor | None,
    sink: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention over a sliding window and compressed entries, the keys being the values.

    Args:
        query: [batch, length, heads, head_dim].
        window: [batch, length, head_dim].
        near: From `window_seen`; its window divides ``length``.
        entries: [batch, width, head_dim], or None for the window alone.
        seen: [batch or 1, length, width] bool, which entries a query attends to.
        sink: [heads], float32.

    Returns:
        [batch, length, heads, head_dim], and the log of each query's denominator [batch, length, heads]
        float32, through which no gradient flows.
    """
    attended, total = _Attention.apply(query, window, near, entries, seen, sink)
    return attended, total


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query, window, near, entries, seen, sink):  # type: ignore[no-untyped-def]
        batch, _, heads, channels = query.shape
        scale = channels**-0.5
        chunks, keys = _chunks(query, near), _keys(window, near)
        scores = _rows(torch.bmm(chunks, keys.transpose(1, 2)), near, batch, heads)
        if entries is None:
            near_up, factor, total = _softmax_window(scores, near, sink, scale)
            out, far_up = (
                torch.bmm(near_up.view(len(chunks), -1, keys.shape[1]), keys).view(query.shape),
                None,
            )
        else:
            far = torch.bmm(query.flatten(1, 2), entries.transpose(1, 2)).unflatten(1, (-1, heads))
            near_up, far_up, factor, total = _softmax(scores, near, far, seen, sink, scale)
            out = torch.bmm(near_up.view(len(chunks), -1, keys.shape[1]), keys).view(query.shape)
            out = out + torch.bmm(far_up.flatten(1, 2), entries).view(query.shape)
        out = (out * factor.unsqueeze(-1)).to(query.dtype)
        ctx.save_for_backward(query, window, near, entries, sink, near_up, far_up, factor, total, out)
        ctx.mark_non_differentiable(total)
        return out, total

    @staticmethod
    def backward(ctx: Any, gradient, _):  # type: ignore[no-untyped-def]
        query, window, near, entries, sink, near_up, far_up, factor, total, out = ctx.saved_tensors
        gradient = gradient.contiguous()
        scale = query.shape[-1] ** -0.5
        delta, weighted = _prepare(gradient, out, factor)
        chunks, keys, slopes = _chunks(query, near), _keys(window, near), _chunks(gradient, near)
        inner = torch.bmm(slopes, keys.transpose(1, 2)).view(near_up.shape)
        slope = _slope(near_up, inner, delta, factor, scale).view(len(chunks), -1, keys.shape[1])
        up = near_up.view(len(chunks), -1, keys.shape[1])
        d_keys = torch.bmm(slope.transpose(1, 2), chunks) + torch.bmm(
            up.transpose(1, 2), _chunks(weighted, near)
        )
        d_window = _unchunk(d_keys.unflatten(0, (len(query), -1)))
        d_query, d_entries = torch.bmm(slope, keys).view(query.shape), None
        if entries is not None:
            inner = torch.bmm(gradient.flatten(1, 2), entries.transpose(1, 2)).view(far_up.shape)
            slope = _slope(far_up, inner, delta, factor, scale).flatten(1, 2)
            d_query = d_query + torch.bmm(slope, entries).view(query.shape)
            d_entries = torch.bmm(slope.transpose(1, 2), query.flatten(1, 2))
            d_entries = d_entries + torch.bmm(far_up.flatten(1, 2).transpose(1, 2), weighted.flatten(1, 2))
        d_sink = -((sink - total).exp() * delta).sum((0, 1))
        return d_query, d_window, None, d_entries, None, d_sink


def _chunks(rows: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
    """[batch, length, heads, d] to [batch × chunks, window × heads, d], without a copy."""
    return rows.view(len(rows) * near.shape[0], -1, rows.shape[-1])


def _rows(scores: torch.Tensor, near: torch.Tensor, batch: int, heads: int) -> torch.Tensor:
    """[batch × chunks, window × heads, 2 × window] to [batch, chunks, window, heads, 2 × window]."""
    return scores.view(batch, near.shape[0], near.shape[1], heads, near.shape[3])


def _keys(window: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
    """[batch, length, d] to [batch × chunks, 2 × window, d]: the chunk before (zeros first) and the chunk."""
    chunks = window.unflatten(1, near.shape[:2])
    before = torch.cat((torch.zeros_like(chunks[:, :1]), chunks[:, :-1]), dim=1)
    return torch.cat((before, chunks), dim=2).flatten(0, 1)


def _unchunk(keys: torch.Tensor) -> torch.Tensor:
    """Gradients of `_keys` [batch, chunks, 2 × window, d] added up to [batch, length, d]."""
    before, own = keys.chunk(2, dim=2)
    own = own.clone()
    own[:, :-1] += before[:, 1:]
    return own.flatten(1, 2)


@compiled
def _softmax_window(
    scores: torch.Tensor, near: torch.Tensor, sink: torch.Tensor, scale: float
) -> tuple[torch.Tensor, ...]:
    """Numerators of the window, the factor that normalises them and the log of the denominator."""
    batch, chunks, window, heads, _ = scores.shape
    logits = torch.where(near, scores.float() * scale, -torch.inf)
    largest = torch.maximum(logits.amax(-1), sink)
    up = (logits - largest.unsqueeze(-1)).exp()
    total = up.sum(-1) + (sink - largest).exp()
    shape = (batch, chunks * window, heads)
    return up.to(scores.dtype), (1 / total).view(shape), (largest + total.log()).view(shape)


@compiled
def _softmax(
    scores: torch.Tensor,
    near: torch.Tensor,
    far: torch.Tensor,
    seen: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """As `_softmax_window` with the entries' scores [batch, length, heads, width] in the same denominator."""
    logits = torch.where(near, scores.float() * scale, -torch.inf)
    others = torch.where(seen.unsqueeze(2), far.float() * scale, -torch.inf)
    shape = far.shape[:3]
    largest = torch.maximum(logits.amax(-1).view(shape), torch.maximum(others.amax(-1), sink))
    near_up = (logits - largest.view(logits.shape[:4]).unsqueeze(-1)).exp()
    far_up = (others - largest.unsqueeze(-1)).exp()
    total = near_up.sum(-1).view(shape) + far_up.sum(-1) + (sink - largest).exp()
    return near_up.to(scores.dtype), far_up.to(far.dtype), 1 / total, largest + total.log()


@compiled
def _prepare(
    gradient: torch.Tensor, out: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient · result per row, and the gradient weighted by the softmax's factor."""
    wide = gradient.float()
    return (wide * out.float()).sum(-1), (wide * factor.unsqueeze(-1)).to(gradient.dtype)


@compiled
def _slope(
    up: torch.Tensor, inner: torch.Tensor, delta: torch.Tensor, factor: torch.Tensor, scale: float
) -> torch.Tensor:
    """Gradient of the scores from numerators and gradient · values."""
    shape = up.shape[:-1]
    change = inner.float() - delta.view(shape).unsqueeze(-1)
    return (up.float() * change * (factor * scale).view(shape).unsqueeze(-1)).to(up.dtype)
