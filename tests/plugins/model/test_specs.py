"""What vLLM makes of the specs: what it hashes, what it rewinds, which blocks it keeps for a replay."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm_deepinfer_plugins.model.specs import ReplayedWindowSpec, ScratchSpec


def replayed(window: int, channels: int = 64) -> ReplayedWindowSpec:
    return ReplayedWindowSpec(
        block_size=32,
        num_kv_heads=1,
        head_size=channels,
        dtype=torch.bfloat16,
        sliding_window=window + 1,
        dcp_sharded=False,
    )


def scratch() -> ScratchSpec:
    return ScratchSpec(
        block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32, sliding_window=2, dcp_sharded=False
    )


def test_what_is_cached_and_what_is_replayed() -> None:
    assert not replayed(128).prefix_cacheable and replayed(128).prefix_replay_tokens == 128
    assert not scratch().prefix_cacheable and scratch().prefix_replay_tokens == 0


def test_grouped_by_window_and_managed_as_windows() -> None:
    for spec in (replayed(128), scratch()):
        assert KVCacheSpecRegistry.get_manager_class(spec) is SlidingWindowManager
    same = UniformTypeKVCacheSpecs.from_specs({"a": replayed(128), "b": replayed(128, 32)})
    assert same is not None and same.prefix_replay_tokens == 128 and not same.prefix_cacheable
    assert UniformTypeKVCacheSpecs.from_specs({"a": replayed(128), "b": replayed(64)}) is None
    assert UniformTypeKVCacheSpecs.from_specs({"a": replayed(1), "b": scratch()}) is None
    assert ReplayedWindowSpec.merge([replayed(9), replayed(9)]) == replayed(9)


@pytest.mark.parametrize("window", [1, 15, 17, 33, 127, 128, 129])
def test_the_block_of_the_first_replayed_token_is_kept(window: int) -> None:
    """For every hit that ends on a block, and any window: also where W − 1 is a multiple of the block."""
    for block in (1, 16, 32, 64, 128, 256):
        for hit in range(block, 601, block):
            if hit <= window:
                continue
            skipped = max(0, hit - (window + 1) + 1)  # SlidingWindowManager.get_num_skipped_tokens
            assert skipped // block <= (hit - window) // block
