"""The three cache representations as quantise-dequantise functions (part of V4.1's function, not an option).

Window KV is FP8 E4M3 with a power-of-two scale per 32 channels, compressed KV is E2M1 with an E4M3 scale per
16, index queries and keys are E2M1 with a power-of-two scale per 32 (technical report arXiv 2609.19969,
section on KV compression). Every value that comes out has at most six significant bits, so bfloat16 holds it
exactly: the paged caches store bfloat16 whatever the model's dtype is.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.nn import functional as F

CacheFormat = Literal["fp8", "nvfp4", "mxfp4"]
BLOCK: dict[CacheFormat, int] = {"fp8": 32, "nvfp4": 16, "mxfp4": 32}
CACHE_DTYPE = torch.bfloat16

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0


def quantize_cache(values: torch.Tensor, fmt: CacheFormat) -> torch.Tensor:
    """Round the last axis to what a cache of that format returns; the gradient passes straight through.

    Args:
        values: [..., channels] of any float dtype. A last group of fewer channels than a block has its own
            scale.
        fmt: ``fp8`` for window KV, ``nvfp4`` for compressed KV, ``mxfp4`` for index queries and keys.

    Returns:
        [..., channels] in the input's dtype.
    """
    if not torch.is_grad_enabled():
        return _round(values, fmt)
    rounded: torch.Tensor = _StraightThrough.apply(values, fmt)
    return rounded


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, fmt: CacheFormat) -> torch.Tensor:
        return _round(values, fmt)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def _round(values: torch.Tensor, fmt: CacheFormat) -> torch.Tensor:
    block, channels = BLOCK[fmt], values.shape[-1]
    groups = F.pad(values.float(), (0, -channels % block)).unflatten(-1, (-1, block))
    largest = groups.abs().amax(-1, keepdim=True)
    if fmt == "fp8":
        scale = _power_of_two_at_least(largest.clamp_min(1e-4) * (1 / _E4M3_MAX))
        rounded = (groups / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).float()
    elif fmt == "nvfp4":
        scale = (largest.clamp_min(6 * 2.0**-9) / _E2M1_MAX).to(torch.float8_e4m3fn).float()
        rounded = _round_e2m1(groups / scale)
    else:
        scale = _power_of_two_at_least(largest.clamp_min(6 * 2.0**-126) * (1 / _E2M1_MAX))
        rounded = _round_e2m1(groups / scale)
    return (rounded * scale).flatten(-2)[..., :channels].to(values.dtype)


def _power_of_two_at_least(values: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is no less than each positive normal float32, from its bits."""
    bits = values.contiguous().view(torch.int32)
    has_fraction = (bits & 0x7FFFFF) != 0
    return (((bits >> 23) + has_fraction) << 23).view(torch.float32)


def _round_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest of E2M1's sixteen values; a tie goes to the even code.

    Its steps are 0.5 below 2, 1 below 4 and 2 up to 6; within each the even multiples have the even codes.
    """
    magnitude = values.abs().clamp_max(_E2M1_MAX)
    step = 0.5 + 0.5 * (magnitude >= 2) + (magnitude >= 4)
    return torch.copysign((magnitude / step).round() * step, values)
