"""Packed products against the plain ones, in a model's shapes and in some that only oneDNN takes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from vllm_deepinfer_plugins.model import packing
from vllm_deepinfer_plugins.model.layers import Linear


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
    if not packing.can_pack(torch.bfloat16, torch.device("cpu")):
        pytest.skip("vLLM's oneDNN products are not in this build")


@pytest.mark.parametrize("rows", [1, 3, 32, 200])
@pytest.mark.parametrize(("outputs", "inputs"), [(512, 128), (32, 32), (64, 1024), (4, 64), (20, 48)])
def test_a_packed_product_is_the_plain_one(rows: int, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(rows * outputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(torch.bfloat16)
    values = torch.randn(rows, inputs, generator=generator).to(torch.bfloat16)
    expected = F.linear(values.float(), weight.float())
    packed = packing._product(weight)(values)
    assert packed.shape == (rows, outputs) and packed.dtype == torch.bfloat16
    assert torch.allclose(packed.float(), expected, rtol=2**-7, atol=2**-7 * inputs**0.5)


@torch.no_grad()
def test_packing_frees_the_weights_and_keeps_the_answers() -> None:
    layer = Linear(64, 96, torch.bfloat16)
    wide = Linear(64, 96, torch.float32)
    model = torch.nn.ModuleList([layer, wide])
    values = torch.randn(5, 64).to(torch.bfloat16)
    before = layer(values)
    packing.pack(model)
    assert layer.weight.numel() == 0 and wide.weight.numel() == 96 * 64
    assert torch.allclose(layer(values).float(), before.float(), rtol=2**-7, atol=2**-5)
    assert wide.packed is None


def test_float32_is_never_packed() -> None:
    assert not packing.can_pack(torch.float32, torch.device("cpu"))
