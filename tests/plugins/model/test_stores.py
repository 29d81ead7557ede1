"""Paged stores: what vLLM's block manager is told, and how pages become rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec
from vllm_deepinfer_plugins.model.stores import PagedBackend, PagedMetadataBuilder, PagedStore


def vllm_config(block_size: int = 16) -> Any:
    """The part of vLLM's config that a store reads."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=block_size),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


def test_a_store_registers_itself_once() -> None:
    config = vllm_config()
    store = PagedStore(config, "layers.3.attn.window", 32, torch.bfloat16, window=16)
    assert config.compilation_config.static_forward_context == {"layers.3.attn.window": store}
    assert store.get_attn_backend() is PagedBackend
    with pytest.raises(ValueError, match=r"duplicate layer name layers\.3\.attn\.window"):
        PagedStore(config, "layers.3.attn.window", 32, torch.bfloat16)


@pytest.mark.parametrize(("ratio", "block_size"), [(1, 16), (2, 16), (4, 64), (1, 3)])
def test_entries_are_full_attention_pages_of_fewer_rows(ratio: int, block_size: int) -> None:
    config = vllm_config(block_size)
    spec = PagedStore(config, "layers.0.entries", 64, torch.bfloat16, ratio=ratio).get_kv_cache_spec(config)
    assert type(spec) is MLAAttentionSpec
    assert (spec.block_size, spec.num_kv_heads, spec.head_size, spec.dtype) == (
        block_size,
        1,
        64,
        torch.bfloat16,
    )
    assert spec.tokens_per_state == ratio
    assert spec.page_size_bytes == block_size // ratio * 64 * 2


@pytest.mark.parametrize(("channels", "dtype", "window"), [(32, torch.bfloat16, 16), (1, torch.int32, 3)])
def test_what_lies_behind_the_window_may_go(channels: int, dtype: torch.dtype, window: int) -> None:
    config = vllm_config()
    spec = PagedStore(config, "layers.0.window", channels, dtype, window=window).get_kv_cache_spec(config)
    assert type(spec) is SlidingWindowMLASpec
    assert spec.sliding_window == window
    assert spec.page_size_bytes == 16 * channels * dtype.itemsize


@pytest.mark.parametrize(("rows", "stride"), [(4, 4), (4, 7), (2, 16), (1, 1)])
def test_pages_are_rows_at_a_fixed_stride(rows: int, stride: int) -> None:
    """A block's pages of several stores may lie behind one another: the block stride is larger then."""
    channels, blocks, before = 3, 5, 6
    raw = torch.arange(float(before + blocks * stride * channels))
    pages = raw.as_strided((blocks, 1, rows, channels), (stride * channels, channels, channels, 1), before)
    store = PagedStore(vllm_config(), "layers.0.x", channels, torch.float32)
    store.bind_kv_cache(pages)
    assert store.rows_per_block == stride
    for block in range(blocks):
        for row in range(rows):
            assert torch.equal(store.rows[block * stride + row], pages[block, 0, row])
    assert len(store.rows) == (blocks - 1) * stride + rows, "no row behind the last page"
    store.rows[stride + rows - 1] = -1.0
    assert pages[1, 0, rows - 1].tolist() == [-1, -1, -1], "a view, no copy"
    assert int((raw == -1).sum()) == channels


@pytest.mark.parametrize("shape", [(4, 1, 2, 5), (4, 1, 2, 3)])
def test_pages_of_another_shape(shape: tuple[int, ...]) -> None:
    store = PagedStore(vllm_config(), "layers.0.x", 4, torch.float32)
    with pytest.raises(AssertionError):
        store.bind_kv_cache(torch.zeros(shape))


def test_a_stride_that_cuts_rows() -> None:
    store = PagedStore(vllm_config(), "layers.0.x", 4, torch.float32)
    with pytest.raises(AssertionError):
        store.bind_kv_cache(torch.zeros(100).as_strided((3, 1, 2, 4), (9, 4, 4, 1)))


def test_metadata_is_what_the_runner_computed() -> None:
    common = SimpleNamespace(
        block_table_tensor=torch.tensor([[3, 1]]),
        slot_mapping=torch.tensor([48, 49]),
        query_start_loc_cpu=torch.tensor([0, 2]),
        seq_lens=torch.tensor([2]),
        num_actual_tokens=2,
    )
    config = vllm_config()
    spec = PagedStore(config, "layers.0.x", 4, torch.float32).get_kv_cache_spec(config)
    builder = PagedMetadataBuilder(spec, ["layers.0.x"], config, torch.device("cpu"))
    metadata = builder.build(0, common)  # type: ignore[arg-type]
    assert metadata.block_table is common.block_table_tensor
    assert metadata.slots is common.slot_mapping
    assert metadata.starts is common.query_start_loc_cpu
    assert metadata.lengths is common.seq_lens
    assert metadata.tokens == 2


def test_the_backend_has_no_kernel() -> None:
    assert PagedBackend.get_builder_cls() is PagedMetadataBuilder
    assert set(PagedBackend.supported_dtypes) == {torch.bfloat16, torch.float32}
    assert PagedBackend.supports_batch_invariance()
    with pytest.raises(NotImplementedError, match="compute attention themselves"):
        PagedBackend.get_impl_cls()
