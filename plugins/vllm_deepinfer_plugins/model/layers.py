"""The small modules that every part of the model uses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from ..kernels import active

Product = Callable[[torch.Tensor], torch.Tensor]
"""Rows [n, inputs] to [n, outputs] with a weight that some library has packed for itself."""


class RMSNorm(nn.Module):
    """Root-mean-square normalisation in float32, scaled before the result is cast back.

    V4.1's eps is 1e-20, far below bfloat16's and float16's steps: the norm has to be taken in float32.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[..., size] in and out, same dtype."""
        kernels = active(values)
        if kernels is not None and values.ndim == 2:
            return kernels.rows(values, norm=self.weight, eps=self.eps)
        if values.dtype == torch.bfloat16 and not torch.is_grad_enabled():
            return F.rms_norm(values, self.weight.shape, self.weight, self.eps)  # the same in one kernel
        wide = values.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * wide).to(values.dtype)


class Linear(nn.Linear):
    """A bias-free projection; a float32 weight computes in float32 whatever comes in.

    ``packed`` takes the product over once a library has packed the weight (see `packing`).
    """

    packed: Product | None = None

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=dtype)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to [..., outputs] in the weight's dtype."""
        if self.packed is not None:
            return self.packed(values)
        return F.linear(values.to(self.weight.dtype), self.weight)


class GroupedLinear(nn.Module):
    """A block-diagonal projection: group g of the input meets rows g of the weight only.

    Args:
        inputs: Channels of one group.
        outputs: Channels of one group after the projection.
        groups: Number of groups; the weight is [groups × outputs, inputs] as in the checkpoint.
    """

    def __init__(self, inputs: int, outputs: int, groups: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.groups = groups
        self.packed: Product | None = None
        self.weight = nn.Parameter(torch.empty(groups * outputs, inputs, dtype=dtype))
        nn.init.normal_(self.weight, std=inputs**-0.5)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[tokens, groups × inputs] to [tokens, groups × outputs]."""
        if self.packed is not None:
            return self.packed(values)
        grouped = values.unflatten(-1, (self.groups, -1)).transpose(0, 1)
        weight = self.weight.unflatten(0, (self.groups, -1))
        return torch.bmm(grouped, weight.transpose(1, 2)).transpose(0, 1).flatten(1)
