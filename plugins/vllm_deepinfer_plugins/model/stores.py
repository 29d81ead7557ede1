"""Paged stores: what the model keeps between steps, as KV-cache specs that vLLM's block manager allocates.

Everything that outlives a step lies in pages: window KV per layer, compressed entries per KV source, the
compressor inputs of an unfinished group, token ids for Engram. A preemption, an abort or a prefix hit
therefore leaves nothing stale: the blocks say what is valid. Groups come from vLLM: full attention for the
entries, one sliding-window group (or several) for each window length.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_deepinfer.checkpoint.config import TextConfig

from .specs import ReplayedWindowSpec, ScratchSpec


class Hits(Enum):
    """What becomes of the rows of a window at a prefix hit."""

    CACHED = "cached"
    """They are in the prefix cache, and without them there is no hit."""
    REPLAYED = "replayed"
    """They are computed again (SWA Bounded Replay)."""
    NEVER = "never"
    """No hit ends where they would be read."""


SPECS = {Hits.CACHED: SlidingWindowMLASpec, Hits.REPLAYED: ReplayedWindowSpec, Hits.NEVER: ScratchSpec}


def window_kind(config: TextConfig, *, replayed: bool) -> dict[str, Any]:
    """What `PagedStore` is told of a layer's window KV; equal kinds share their blocks.

    Args:
        replayed: It is rebuilt after a prefix hit and leaves the prefix cache.
    """
    # vLLM's prefix cache never hits behind a window of one token.
    reach = config.sliding_window if replayed else max(config.sliding_window, 2)
    return {"window": reach, "hits": Hits.REPLAYED if replayed else Hits.CACHED}


@dataclass
class PagedMetadata(AttentionMetadata):
    """One KV-cache group's part of a step.

    Attributes:
        block_table: [requests, blocks] int32; 0 is the null block, whose bytes stay zero.
        slots: [tokens] int64, block × block size + place of each token.
        starts: [requests + 1] int32 on the host, first row of each request.
        lengths: [requests] int32, computed tokens of each request with this step's.
        tokens: Rows of the step.
    """

    block_table: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    tokens: int


class PagedMetadataBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Takes over what the runner computed; the model derives row numbers once per step and group."""

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        common = common_attn_metadata
        return PagedMetadata(
            block_table=common.block_table_tensor,
            slots=common.slot_mapping,
            starts=common.query_start_loc_cpu,
            lengths=common.seq_lens,
            tokens=common.num_actual_tokens,
        )


class PagedBackend(AttentionBackend):
    """Names the layout; the layers compute their attention themselves and never ask for an implementation."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "DEEPINFER_V41"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        raise NotImplementedError("DEEPINFER_V41 layers compute attention themselves")

    @staticmethod
    def get_builder_cls() -> type[PagedMetadataBuilder]:
        return PagedMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # Pages of several sizes share a block, so the block must be the outermost axis.
        return (KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


class PagedStore(nn.Module, AttentionLayerBase):
    """One paged array of rows, registered with vLLM under ``prefix``.

    Args:
        vllm_config: The engine's config; the block size and the layer registry come from it.
        prefix: Unique layer name with exactly one number in it.
        channels: Elements of a row.
        dtype: Element type of the pages.
        window: Rows that stay readable behind the newest token, or None for all of them.
        ratio: Tokens per row.
        hits: What becomes of the rows of a window at a prefix hit.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        prefix: str,
        channels: int,
        dtype: torch.dtype,
        *,
        window: int | None = None,
        ratio: int = 1,
        hits: Hits = Hits.CACHED,
    ) -> None:
        super().__init__()
        self.prefix, self.channels, self.dtype = prefix, channels, dtype
        self.window, self.ratio, self.hits = window, ratio, hits
        self.block_size = vllm_config.cache_config.block_size
        self.kv_cache = torch.tensor([])
        self.rows = torch.tensor([])
        self.rows_per_block = 0
        layers = vllm_config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"duplicate layer name {prefix}")
        layers[prefix] = self

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Pages of ``block_size / ratio`` rows; blocks are aligned so that rows form one strided array."""
        common: dict[str, Any] = {
            "block_size": vllm_config.cache_config.block_size,
            "num_kv_heads": 1,
            "head_size": self.channels,
            "dtype": self.dtype,
            "block_stride_alignment": self.channels * self.dtype.itemsize,
        }
        if self.window is not None:
            more = int(self.hits is Hits.REPLAYED)
            return SPECS[self.hits](**common, sliding_window=self.window + more, dcp_sharded=False)
        return MLAAttentionSpec(**common, tokens_per_state=self.ratio)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PagedBackend

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take the pages [blocks, 1, rows, channels], viewed as rows [all, channels] at a fixed stride."""
        self.kv_cache = kv_cache.squeeze(1)
        blocks, rows, channels = self.kv_cache.shape
        stride = self.kv_cache.stride(0)
        assert channels == self.channels and stride % channels == 0 and self.kv_cache.stride(1) == channels
        self.rows_per_block = stride // channels
        total = (blocks - 1) * self.rows_per_block + rows
        self.rows = self.kv_cache.as_strided((total, channels), (channels, 1), self.kv_cache.storage_offset())
