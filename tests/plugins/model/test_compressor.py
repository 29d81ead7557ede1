"""The compressor and the index keys against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from vllm_deepinfer_plugins.model.compressor import Compressor, IndexKeys
from vllm_deepinfer_plugins.model.quant import quantize_cache
from vllm_deepinfer_plugins.model.rope import Rotary, rotate

from .samples import noise, text_config

DTYPES = [torch.float32, torch.bfloat16]


def compressor(ratio: int, dtype: torch.dtype = torch.float32) -> Compressor:
    torch.manual_seed(ratio)
    module = Compressor(text_config(), ratio, dtype)
    module.norm.weight.data = noise(32, seed=9, dtype=dtype)
    return module


def normal(values: torch.Tensor) -> torch.Tensor:
    return values / (values.square().mean() + 1e-20).sqrt()


def test_ratio_one_is_a_projection_without_gate() -> None:
    module, x = compressor(1), noise(5, 64)
    assert {name for name, _ in module.named_parameters()} == {"wkv.weight", "norm.weight"}
    raw = module.project(x)
    torch.testing.assert_close(raw, x @ module.wkv.weight.T)
    pooled = module.pool(raw.unsqueeze(1))
    for token in range(5):
        torch.testing.assert_close(pooled[token], module.norm.weight * normal(raw[token]))


@pytest.mark.parametrize("ratio", [2, 3, 4])
def test_a_group_is_pooled_channel_by_channel(ratio: int) -> None:
    module, x = compressor(ratio), noise(ratio, 64)
    raw = module.project(x)
    assert raw.shape == (ratio, 64)
    values, gates = x @ module.wkv.weight.T, x @ module.wgate.weight.T
    torch.testing.assert_close(raw, torch.cat((values, gates), dim=1))
    latent = torch.empty(32)
    for channel in range(32):
        powers = [math.exp(gates[token, channel].item()) for token in range(ratio)]
        weighed = [power * values[token, channel].item() for token, power in enumerate(powers)]
        latent[channel] = sum(weighed) / sum(powers)
    torch.testing.assert_close(module.pool(raw.unsqueeze(0))[0], module.norm.weight * normal(latent))


def test_equal_gates_average() -> None:
    module = compressor(2)
    module.wgate.weight.data.zero_()
    raw = module.project(noise(2, 64))
    wanted = module.norm.weight * normal(raw[:, :32].mean(0))
    torch.testing.assert_close(module.pool(raw.unsqueeze(0))[0], wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pooling_runs_in_float32(dtype: torch.dtype) -> None:
    """Above ratio 1 the projections and their stored rows are float32 whatever the model's dtype is."""
    module = compressor(2, dtype)
    raw = module.project(noise(4, 64, dtype=dtype))
    assert raw.dtype == torch.float32
    assert (module.wkv.weight.dtype, module.wgate.weight.dtype) == (torch.float32, torch.float32)
    assert module.pool(raw.unflatten(0, (2, 2))).dtype == dtype
    single = compressor(1, dtype)
    assert single.project(noise(4, 64, dtype=dtype)).dtype == dtype


def test_groups_do_not_see_each_other() -> None:
    module, raw = compressor(2), noise(6, 2, 64)
    one_by_one = torch.cat([module.pool(group.unsqueeze(0)) for group in raw])
    torch.testing.assert_close(module.pool(raw), one_by_one)


@pytest.mark.parametrize("dtype", DTYPES)
def test_index_keys(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = text_config()
    module, latent = IndexKeys(config, dtype), noise(7, 32, dtype=dtype)
    module.k_norm.weight.data = noise(32, seed=1, dtype=dtype)
    rotations = Rotary(config, compressed=True)(torch.arange(7))
    with torch.no_grad():
        keys = module.keys(latent, rotations)
        projected = latent @ module.wk.weight.T
        wanted = torch.stack([module.k_norm.weight.float() * normal(row.float()) for row in projected])
        wanted = rotate(wanted.to(dtype), rotations)
    assert keys.dtype == dtype
    assert torch.equal(quantize_cache(keys, "mxfp4"), keys), "already values of the format"
    # A last bit before the rounding can move a value to the next code, but only few of them.
    agree = torch.isclose(keys.float(), quantize_cache(wanted, "mxfp4").float())
    assert float(agree.float().mean()) > 0.97


def test_gradients_reach_every_parameter() -> None:
    torch.manual_seed(0)
    module, x = compressor(2), noise(8, 64).requires_grad_()
    module.pool(module.project(x).unflatten(0, (4, 2))).square().mul(noise(4, 32, seed=2)).sum().backward()
    for name, parameter in [*module.named_parameters(), ("x", x)]:
        assert parameter.grad is not None and float(parameter.grad.abs().sum()) > 0, name
