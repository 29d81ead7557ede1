"""Rotary embedding of adjacent channel pairs, with YaRN on the layers that read a compressed cache.

V4.1 has two of them: layers with the sliding window alone use ``rope_theta`` without scaling, all others
``compress_rope_theta`` with YaRN's frequencies and no attention factor (technical report; vLLM
``models/deepseek_v41/common/rope.py``).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from vllm_deepinfer.checkpoint.config import TextConfig

from ..kernels import active


class Rotary(nn.Module):
    """Turns positions into unit complex numbers, one per channel pair.

    Args:
        config: The language model's config.
        compressed: Whether this is the embedding of the layers that read a compressed cache.
    """

    def __init__(self, config: TextConfig, *, compressed: bool) -> None:
        super().__init__()
        self.dim = config.qk_rope_head_dim
        self.theta = config.compress_rope_theta if compressed else config.rope_theta
        scaling = (config.rope_scaling or {}) if compressed else {}
        self.scaling = {} if scaling.get("rope_type", scaling.get("type")) == "default" else scaling

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Rotations [tokens, pairs], complex64, for integer positions [tokens]."""
        angles = positions.float().unsqueeze(-1) * self._frequencies(positions.device)
        return torch.polar(torch.ones_like(angles), angles)

    def _frequencies(self, device: torch.device) -> torch.Tensor:
        """[pairs], float32. No buffer: it would follow the module's dtype and lose bits."""
        return _frequencies(self.dim, self.theta, tuple(sorted(self.scaling.items())), device)


@lru_cache(maxsize=16)
def _frequencies(
    dim: int, theta: float, scaling: tuple[tuple[str, Any], ...], device: torch.device
) -> torch.Tensor:
    exponents = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
    frequencies = 1.0 / theta**exponents
    yarn = dict(scaling)
    original = int(yarn.get("original_max_position_embeddings") or 0)
    if original <= 0:
        return frequencies
    low, high = (
        _pair_that_turns(float(yarn.get(key, turns)), original, dim, theta)
        for key, turns in (("beta_fast", 32), ("beta_slow", 1))
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    ramp = torch.arange(dim // 2, device=device, dtype=torch.float32) - low
    ramp = (ramp / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / float(yarn.get("factor", 1.0)) * ramp + frequencies * (1 - ramp)


def _pair_that_turns(turns: float, length: int, dim: int, theta: float) -> float:
    """Index of the pair that makes that many turns over ``length`` positions (YaRN, arXiv 2309.00071)."""
    return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))


def rotate(
    values: torch.Tensor, rotations: torch.Tensor, *, inverse: bool = False, in_place: bool = False
) -> torch.Tensor:
    """Rotate the last channels of each row; the others pass.

    The complex product is kept whole: two real products round differently, and a bit here can move a value
    into the next FP4 or FP8 bin.

    Args:
        values: [tokens, channels] or [tokens, heads, channels].
        rotations: [tokens, pairs] from `Rotary`.
        inverse: Rotate back, as the attention output needs.
        in_place: ``values`` may be overwritten.
    """
    kernels = active(values)
    if kernels is not None:
        out = values if in_place and values.is_contiguous() else None
        return kernels.rows(values, turns=rotations, inverse=inverse, out=out)
    width = rotations.shape[-1] * 2
    pairs = torch.view_as_complex(values[..., -width:].float().unflatten(-1, (-1, 2)).contiguous())
    factor = rotations if values.ndim == 2 else rotations.unsqueeze(1)
    turned = torch.view_as_real(pairs * (factor.conj() if inverse else factor)).flatten(-2)
    return torch.cat((values[..., :-width], turned.to(values.dtype)), dim=-1)
