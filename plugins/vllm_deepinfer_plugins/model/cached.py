"""What a cached row goes through: norm, rotation, and the rounding of its cache."""

from __future__ import annotations

import torch

from ..kernels import active
from .layers import RMSNorm
from .quant import CacheFormat, quantize_cache
from .rope import rotate


def cached_row(
    values: torch.Tensor, rotations: torch.Tensor, fmt: CacheFormat, norm: RMSNorm | None = None
) -> torch.Tensor:
    """Rows as a cache of that format returns them.

    Args:
        values: [tokens, channels] or [tokens, heads, channels].
        rotations: [tokens, pairs] from `rope.Rotary`, for the last channels.
        fmt: See `quant.quantize_cache`.
        norm: Taken first; None for rows that are normalised already.

    Returns:
        The same shape and dtype.
    """
    kernels = active(values)
    if kernels is not None:
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return kernels.rows(values, norm=weight, eps=eps, turns=rotations, fmt=fmt)
    return quantize_cache(rotate(values if norm is None else norm(values), rotations), fmt)
