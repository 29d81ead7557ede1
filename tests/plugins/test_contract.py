"""What the model class touches in vLLM 0.32.0 and PyTorch 2.13; when a pin moves, this says where to look."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
from typing import Any

import pytest
import torch

vllm = pytest.importorskip("vllm", reason="the plugins' engine package is not installed")


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def _fields(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def test_the_pin() -> None:
    assert importlib.metadata.version("vllm").startswith("0.32.0"), (
        "read plugins/…/model/stores.py and config_hook.py"
    )
    assert torch.__version__.startswith("2.13."), "read plugins/…/model/attention.py (_flash) and tiles.py"


def test_the_registries_that_register_writes_to() -> None:
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, DeepseekV4ForCausalLMConfig

    assert _parameters(ModelRegistry.register_model) == ["model_arch", "model_cls"]
    assert isinstance(MODELS_CONFIG_MAP, dict)
    hooks = DeepseekV4ForCausalLMConfig
    assert _parameters(hooks.verify_and_update_model_config) == ["model_config"]
    assert _parameters(hooks.verify_and_update_config) == ["vllm_config"]


def test_the_hooks_run_before_quantisation_and_platform_are_settled() -> None:
    """`config_hook` takes quantisation and latent attention back; later it would be too late."""
    from vllm.config import ModelConfig, VllmConfig

    model = inspect.getsource(ModelConfig.__post_init__)
    assert model.index("_try_verify_and_update_model_config()") < model.index("_verify_quantization()")
    whole = inspect.getsource(VllmConfig.__post_init__)
    assert whole.index("try_verify_and_update_config()") < whole.index("check_and_update_config(")


def test_the_fields_that_the_config_hook_corrects() -> None:
    from vllm.config.model_arch import ModelArchitectureConfig

    assert {"is_deepseek_mla", "quantization_config"} <= _fields(ModelArchitectureConfig)


def test_the_cpu_platform_still_misjudges_v41() -> None:
    """Why `is_deepseek_mla` is taken back. If this fails, the correction may be dropped."""
    from vllm.platforms.cpu import CpuPlatform

    source = inspect.getsource(CpuPlatform.check_and_update_config)
    assert '"deepseek_v4"' in source and '"deepseek_v41"' not in source
    assert "enable_prefix_caching = False" in source


def test_the_specs_of_the_stores() -> None:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    common: dict[str, Any] = {"block_size": 32, "num_kv_heads": 1, "head_size": 24, "dtype": torch.bfloat16}
    entries = MLAAttentionSpec(**common, tokens_per_state=2, block_stride_alignment=48)
    assert entries.page_size_bytes == 16 * 24 * 2 and entries.get_block_stride_alignment() == 48
    window = SlidingWindowMLASpec(**common, sliding_window=16, dcp_sharded=False, block_stride_alignment=48)
    assert window.page_size_bytes == 32 * 24 * 2 and window.prefix_cacheable


def test_the_views_that_stores_take_as_rows() -> None:
    """Pages arrive as [blocks, 1, rows, channels] with the block outermost."""
    from vllm.v1.kv_cache_interface import KVCacheTensor, MLAAttentionSpec, create_kv_cache_views
    from vllm.v1.kv_cache_layout import KVCacheLayout

    spec = MLAAttentionSpec(
        block_size=4, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, tokens_per_state=2
    )
    raw = torch.zeros(5 * 64, dtype=torch.int8)
    place = KVCacheTensor(size=raw.numel(), layers=["a"], layer_stride=32, block_stride=64, offset=0)
    (view,) = create_kv_cache_views(raw, spec, 5, KVCacheLayout.BLHNC, place)
    assert view.shape == (5, 1, 2, 8) and view.dtype == torch.bfloat16
    assert view.stride(0) == 32 and view.stride(2) == 8


def test_the_metadata_that_the_builder_takes_over() -> None:
    from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata

    wanted = {"query_start_loc_cpu", "seq_lens", "block_table_tensor", "slot_mapping", "num_actual_tokens"}
    assert wanted <= _fields(CommonAttentionMetadata)
    build = _parameters(AttentionMetadataBuilder.build)
    assert build == ["self", "common_prefix_len", "common_attn_metadata", "fast_build"]
    init = _parameters(AttentionMetadataBuilder.__init__)
    assert init == ["self", "kv_cache_spec", "layer_names", "vllm_config", "device"]


def test_the_layer_interface() -> None:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    assert _parameters(AttentionLayerBase.bind_kv_cache) == ["self", "kv_cache"]
    assert _parameters(AttentionLayerBase.get_kv_cache_spec) == ["self", "vllm_config"]


def test_the_products_that_packing_uses() -> None:
    from vllm import _custom_ops

    assert _parameters(_custom_ops.create_onednn_mm) == ["weight", "primitive_cache_size"]
    assert _parameters(_custom_ops.onednn_mm) == ["dnnl_handler", "x", "bias"]
    assert isinstance(_custom_ops._supports_onednn, bool)
    assert isinstance(torch.ops.mkldnn._is_mkldnn_bf16_supported(), bool)


def test_pytorch_s_blocked_attention_returns_the_log_of_the_sums() -> None:
    """`attention._with_sink` needs the second result; its name is private and has moved before."""
    query, keys = torch.randn(1, 2, 3, 32), torch.randn(1, 2, 5, 32)
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, keys, 0.0, False, attn_mask=torch.zeros(1, 1, 3, 5), scale=0.5
    )
    scores = query @ keys.transpose(-1, -2) * 0.5
    assert torch.allclose(sums, scores.logsumexp(-1), atol=1e-5)
    assert torch.allclose(out, scores.softmax(-1) @ keys, atol=1e-5)
