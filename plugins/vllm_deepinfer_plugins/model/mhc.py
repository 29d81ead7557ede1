"""Single-pass manifold-constrained hyper-connections (mHC): four residual streams between sub-layers.

A sub-layer's mix is computed from the streams that enter it, but its ``pre`` part collapses the input of the
*next* sub-layer (technical report, section 2.4.1). The first sub-layer takes stream 0, the last ``pre``
collapses the output. There is no learned mix at the head.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from vllm_deepinfer.checkpoint.config import TextConfig

from ..kernels import active
from .layers import RMSNorm


class HyperConnection(nn.Module):
    """Predicts one sub-layer's mixing coefficients, in float32."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.streams, self.iterations = config.hc_mult, config.hc_sinkhorn_iters
        self.eps, self.norm_eps = config.hc_eps, config.rms_norm_eps
        width = self.streams * (self.streams + 2)
        self.fn = nn.Parameter(torch.empty(width, self.streams * config.hidden_size, dtype=torch.float32))
        self.base = nn.Parameter(torch.zeros(width, dtype=torch.float32))
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float32))
        nn.init.normal_(self.fn, std=config.initializer_range)
        parts = [0] * self.streams + [1] * self.streams + [2] * self.streams**2
        self.register_buffer("_part", torch.tensor(parts), persistent=False)
        self._part: torch.Tensor

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mixing coefficients for streams [tokens, n, hidden].

        Returns:
            ``pre`` [tokens, n], ``post`` [tokens, n] and ``comb`` [tokens, n (from), n (to)], all float32.
        """
        n = self.streams
        flat = streams.flatten(1).float()
        mixes = F.linear(flat, self.fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.norm_eps)
        logits = torch.addcmul(self.base, mixes, self.scale[self._part])
        pre = torch.sigmoid(logits[:, :n]) + self.eps
        post = 2 * torch.sigmoid(logits[:, n : 2 * n])
        return pre, post, sinkhorn(logits[:, 2 * n :].unflatten(-1, (n, n)), self.iterations, self.eps)


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Make matrices doubly stochastic by alternating column and row normalisation after one softmax.

    Args:
        logits: [tokens, n, n], float32.
        iterations: Column normalisations; the softmax stands for the first row normalisation.
        eps: Added to the matrix once and to every sum.
    """
    matrix = logits.softmax(dim=-1) + eps
    if torch.is_grad_enabled():
        matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
        for _ in range(iterations - 1):
            matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + eps)
            matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
        return matrix
    # The same steps in place: 40 of these run per layer, and allocation is half of their cost. As a tensor,
    # eps is not converted anew in each of them, which took as long as the sums.
    small = matrix.new_tensor(eps)
    matrix.div_(matrix.sum(dim=-2, keepdim=True).add_(small))
    for _ in range(iterations - 1):
        matrix.div_(matrix.sum(dim=-1, keepdim=True).add_(small))
        matrix.div_(matrix.sum(dim=-2, keepdim=True).add_(small))
    return matrix


def enter(
    mixing: HyperConnection, norm: RMSNorm, streams: torch.Tensor, last: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a sub-layer takes from the streams [tokens, n, hidden].

    Args:
        norm: The norm behind the collapse.
        last: [tokens, n] float32, the preceding sub-layer's ``pre``.

    Returns:
        Its normalised input [tokens, hidden], and its own mix ``pre``, ``post`` and ``comb``.
    """
    kernels = active(streams)
    if kernels is not None:
        parts = (mixing.fn, mixing.base, mixing.scale)
        return kernels.enter(streams, last, parts, mixing.eps, mixing.iterations, norm.weight, norm.eps)
    return (norm(collapse(streams, last)), *mixing(streams))


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """A sub-layer's input [tokens, hidden] from [tokens, n, hidden] and the last ``pre`` [tokens, n]."""
    if streams.dtype == torch.bfloat16:
        return torch.bmm(pre.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)
    return (pre.unsqueeze(-1) * streams.float()).sum(1).to(streams.dtype)


def expand(
    output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """The next streams [tokens, n, hidden] from a sub-layer's output [tokens, hidden] and the last streams.

    In bfloat16 the sums run as one small product per token, a sixth of the memory traffic; float32 keeps the
    reference's order of additions.
    """
    kernels = active(output)
    if kernels is not None:
        return kernels.expand(output, streams, post, comb)
    if output.dtype == torch.bfloat16:
        factors = torch.cat((comb.transpose(1, 2), post.unsqueeze(-1)), dim=-1)
        return torch.bmm(factors, torch.cat((streams, output.unsqueeze(1)), dim=1).float()).to(output.dtype)
    added = post.unsqueeze(-1) * output.unsqueeze(1)
    mixed = (comb.unsqueeze(-1) * streams.unsqueeze(2)).sum(1)
    return (added + mixed).to(output.dtype)
