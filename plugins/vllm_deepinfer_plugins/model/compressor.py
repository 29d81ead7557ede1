"""The compressor of a KV source: ``ratio`` tokens become one entry of the shared cache.

An entry is the compressed KV (rotated, NVFP4) beside its index key (rotated, MXFP4); one record holds both.
"""

from __future__ import annotations

import torch
from torch import nn

from vllm_deepinfer.checkpoint.config import TextConfig

from ..kernels import active
from .cached import cached_row
from .layers import Linear, RMSNorm


class Compressor(nn.Module):
    """Pools token groups channel-wise by a softmax gate; ratio 1 is a projection without gate."""

    def __init__(self, config: TextConfig, ratio: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.ratio, self.size, self.dtype = ratio, config.head_dim, dtype
        # Pooled projections run in float32 (the released kernel keeps their state in float32).
        wide = dtype if ratio == 1 else torch.float32
        self.wkv = Linear(config.hidden_size, config.head_dim, wide)
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
        if ratio > 1:
            self.wgate = Linear(config.hidden_size, config.head_dim, torch.float32)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """What one token contributes: [tokens, head_dim], or [tokens, 2 × head_dim] float32 with its gate."""
        if self.ratio == 1:
            latent: torch.Tensor = self.wkv(x)
            return latent
        return torch.cat((self.wkv(x), self.wgate(x)), dim=-1)

    def pool(self, group: torch.Tensor) -> torch.Tensor:
        """Normalised latents [tokens, head_dim] of groups [tokens, ratio, channels] ending at each token."""
        if self.ratio == 1:
            single: torch.Tensor = self.norm(group[:, 0])
            return single
        kernels = active(self.norm.weight)
        if kernels is not None:
            pooled: torch.Tensor = self.norm(kernels.pool(group))
            return pooled
        values, gates = group.split(self.size, dim=-1)
        latent: torch.Tensor = self.norm((values * gates.softmax(dim=1)).sum(dim=1).to(self.dtype))
        return latent


class IndexKeys(nn.Module):
    """Index keys from the latents of a KV source."""

    def __init__(self, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.wk = Linear(config.head_dim, config.index_head_dim, dtype)
        self.k_norm = RMSNorm(config.index_head_dim, config.rms_norm_eps, dtype)

    def keys(self, latent: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """[tokens, index_head_dim] from latents [tokens, head_dim]."""
        return cached_row(self.wk(latent), rotations, "mxfp4", self.k_norm)
