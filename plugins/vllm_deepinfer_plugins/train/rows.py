"""The row functions of a layer in a form that trains quickly; same parameters, same mathematics as `model`.

The plain form follows the released reference operation by operation: complex rotations, a loop over experts,
mixing matrices token by token. Here rotations are real, all experts are one dense product (with eight of them
that is cheaper than sorting rows), and the mixing coefficients lie as [n, n, tokens], so that every loop runs
over tokens. Products run in the dtype of ``streams``. Functions take tensors, not modules: `torch.compile`
then builds each of them once for all layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from vllm_deepinfer.checkpoint.config import TextConfig

from ..model.attention import Attention
from ..model.mhc import HyperConnection
from ..model.moe import MoE
from .compiled import compiled

Tensors = tuple[torch.Tensor, ...]


class Sizes(NamedTuple):
    """What the row functions need of a config besides the shapes of its tensors."""

    heads: int
    groups: int
    iterations: int
    eps: float
    norm_eps: float
    limit: float
    chosen: int
    scale: float
    renormalise: bool

    @classmethod
    def of(cls, config: TextConfig, chosen: int | None = None) -> Sizes:
        """The sizes of a backbone layer, or of a draft block that routes to ``chosen`` experts."""
        return cls(
            config.num_attention_heads,
            config.o_groups,
            config.hc_sinkhorn_iters,
            config.hc_eps,
            config.rms_norm_eps,
            config.swiglu_limit,
            config.num_experts_per_tok if chosen is None else chosen,
            config.routed_scaling_factor,
            config.norm_topk_prob,
        )


def hyper_parts(mixing: HyperConnection) -> Tensors:
    """The tensors that `mix` takes."""
    return mixing.fn, mixing.base, mixing.scale


def query_parts(attn: Attention) -> Tensors:
    """The tensors that `enter` takes of an attention module."""
    return attn.wq_a.weight, attn.q_norm.weight, attn.wq_b.weight, attn.wkv.weight


def expert_parts(ffn: MoE) -> Tensors:
    """The tensors that `leave` takes of a mixture of experts."""
    shared, gate = ffn.shared_experts, ffn.gate
    routed = (gate.weight, gate.bias, ffn.experts.gate_up, ffn.experts.down)
    return *routed, shared.w1.weight, shared.w3.weight, shared.w2.weight


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[..., inputs] to [..., outputs] in the dtype of ``x``; the weight is a float32 master."""
    return F.linear(x, weight.to(x.dtype))


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last axis, taken in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the last 2 × pairs channels of [tokens, heads, channels] by [tokens, pairs]; −sin turns back."""
    width = 2 * cos.shape[-1]
    pairs = x[..., -width:].float().unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = torch.stack((even * c - odd * s, even * s + odd * c), dim=-1).flatten(-2)
    return torch.cat((x[..., :-width], turned.to(x.dtype)), dim=-1)


def mix(streams: torch.Tensor, parts: Tensors, sizes: Sizes) -> Tensors:
    """Float32 ``pre`` [n, tokens], ``post`` [n, tokens] and ``comb`` [n (from), n (to), tokens]."""
    fn, base, scale = parts
    n, flat = streams.shape[1], streams.flatten(1)
    inverse = torch.rsqrt(flat.float().square().mean(-1) + sizes.norm_eps)
    mixes = (fn.to(flat.dtype) @ flat.T).float() * inverse
    pre, post, comb = mixes.split((n, n, n * n))
    pre = torch.sigmoid(pre * scale[0] + base[:n, None]) + sizes.eps
    post = 2 * torch.sigmoid(post * scale[1] + base[n : 2 * n, None])
    matrix = (comb * scale[2] + base[2 * n :, None]).unflatten(0, (n, n)).softmax(dim=1) + sizes.eps
    matrix = matrix / (matrix.sum(dim=0, keepdim=True) + sizes.eps)
    for _ in range(sizes.iterations - 1):
        matrix = matrix / (matrix.sum(dim=1, keepdim=True) + sizes.eps)
        matrix = matrix / (matrix.sum(dim=0, keepdim=True) + sizes.eps)
    return pre, post, matrix


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """A sub-layer's input [tokens, hidden] from streams [tokens, n, hidden] and ``pre`` [n, tokens]."""
    return torch.bmm(pre.T.to(streams.dtype).unsqueeze(1), streams).squeeze(1)


def expand(
    output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """The next streams from a sub-layer's output [tokens, hidden] and the last streams.

    One small product per token in the dtype of the streams: also its gradients are products then, and no
    sums over the channels for each of the twenty coefficients.
    """
    factors = torch.cat((comb, post.unsqueeze(0))).permute(2, 1, 0).to(streams.dtype)
    return torch.bmm(factors.contiguous(), torch.cat((streams, output.unsqueeze(1)), dim=1))


@compiled
def enter(
    streams: torch.Tensor,
    pre: torch.Tensor,
    hyper: Tensors,
    norm_weight: torch.Tensor,
    query: Tensors,
    cos: torch.Tensor,
    sin: torch.Tensor,
    sizes: Sizes,
) -> Tensors:
    """From the streams to what attention needs.

    Returns:
        ``pre``, ``post``, ``comb``; the sub-layer's input [tokens, hidden]; the query latent [tokens, rank];
        queries [tokens, heads, head_dim], rotated; window KV [tokens, head_dim] before its norm.
    """
    wq_a, q_norm, wq_b, wkv = query
    mixed = mix(streams, hyper, sizes)
    x = norm(collapse(streams, pre), norm_weight, sizes.norm_eps)
    latent = norm(linear(x, wq_a), q_norm, sizes.norm_eps)
    queries = turn(linear(latent, wq_b).unflatten(-1, (sizes.heads, -1)), cos, sin)
    return *mixed, x, latent, queries, linear(x, wkv)


@compiled
def leave(
    attended: torch.Tensor,
    streams: torch.Tensor,
    mixed: Tensors,
    output: Tensors,
    hyper: Tensors,
    norm_weight: torch.Tensor,
    experts: Tensors,
    cos: torch.Tensor,
    sin: torch.Tensor,
    sizes: Sizes,
) -> Tensors:
    """From attention's result [tokens, heads, head_dim] through the experts.

    Returns:
        The next streams and ``pre``, and the tokens of each expert [experts], float32.
    """
    wo_a, wo_b = output
    grouped = turn(attended, cos, -sin).flatten(1).unflatten(-1, (sizes.groups, -1)).transpose(0, 1)
    low = torch.bmm(grouped, wo_a.to(grouped.dtype).unflatten(0, (sizes.groups, -1)).transpose(1, 2))
    streams = expand(linear(low.transpose(0, 1).flatten(1), wo_b), streams, mixed[0], mixed[1])
    pre, post, comb = mix(streams, hyper, sizes)
    # `pre` of the attention's mix collapses this sub-layer's input (single-pass hyper-connections).
    x = norm(collapse(streams, mixed[2]), norm_weight, sizes.norm_eps)
    result, load = mixture(x, experts, sizes)
    return expand(result, streams, post, comb), pre, load


def mixture(x: torch.Tensor, parts: Tensors, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """Routed and shared experts as dense products: [tokens, hidden], and the tokens of each expert."""
    gate, bias, gate_up, down, w1, w3, w2 = parts
    count, width = len(gate), down.shape[-1]
    scores = F.softplus(F.linear(x.float(), gate)).sqrt()
    chosen = (scores + bias).topk(sizes.chosen, dim=-1).indices
    mask = (chosen.unsqueeze(-1) == torch.arange(count, device=x.device)).any(1).float()
    weights = scores * mask
    if sizes.renormalise and sizes.chosen > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * sizes.scale
    both = linear(x, gate_up.flatten(0, 1)).unflatten(-1, (count, 2, width))
    hidden = swiglu(both[:, :, 0], both[:, :, 1], sizes.limit) * weights.unsqueeze(-1)
    routed = linear(hidden.flatten(1).to(x.dtype), down.transpose(0, 1).flatten(1))
    shared = swiglu(linear(x, w1), linear(x, w3), sizes.limit).to(x.dtype)
    return routed + linear(shared, w2), mask.sum(0)


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """SiLU(gate) × up in float32, clamped as in `model.moe`."""
    wide, other = gate.float(), up.float()
    if limit > 0:
        wide, other = wide.clamp(max=limit), other.clamp(-limit, limit)
    return F.silu(wide) * other


@compiled
def memory(
    streams: torch.Tensor, embedded: torch.Tensor, wkv: torch.Tensor, factor: torch.Tensor, eps: float
) -> torch.Tensor:
    """Engram: streams [tokens, n, hidden] with the gated read of table rows [tokens, channels] added.

    Args:
        factor: [n, hidden], the product of the two gate weights.
    """
    n, hidden = streams.shape[1:]
    read = linear(embedded.to(streams.dtype), wkv)
    key, value, wide = (
        read[:, :-hidden].float().unflatten(1, (n, hidden)),
        read[:, -hidden:].float(),
        streams.float(),
    )
    scale = torch.rsqrt(wide.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
    match = (wide * factor * key).sum(-1) * scale * hidden**-0.5
    gate = torch.sigmoid(torch.copysign(match.abs().clamp_min(1e-6).sqrt(), match))
    return (wide + gate.unsqueeze(-1) * value.unsqueeze(1)).to(streams.dtype)
