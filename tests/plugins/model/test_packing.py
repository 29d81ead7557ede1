"""Packed products against the plain ones, in a model's shapes and in some that only oneDNN takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from vllm_deepinfer_plugins.kernels import Kernels, load, prepare
from vllm_deepinfer_plugins.model import packing
from vllm_deepinfer_plugins.model.layers import GroupedLinear, Linear
from vllm_deepinfer_plugins.model.moe import MoE
from vllm_deepinfer_plugins.model.tiles import RowTiles

from .samples import text_config


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def _on_onednn() -> bool:
    return prepare.has_onednn_products()


@pytest.fixture
def without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU without AVX-512, where asking for such a product raises."""

    def refused(weight: torch.Tensor) -> None:
        raise RuntimeError("could not create a primitive descriptor for the matmul primitive")

    monkeypatch.setattr(packing, "has_onednn_products", lambda: False)
    monkeypatch.setattr(packing, "_product", refused)


@pytest.mark.skipif("not _on_onednn()", reason="oneDNN has no bfloat16 products on this CPU.")
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


def _kernels_or_none(native: bool) -> Kernels | None:
    return load() if native else None


@torch.no_grad()
@pytest.mark.parametrize("native", [True, False])
def test_packing_frees_the_weights_and_keeps_the_answers(native: bool) -> None:
    layer, odd = Linear(64, 96, torch.bfloat16), Linear(48, 20, torch.bfloat16)
    model = nn.ModuleList([layer, odd])
    values, others = torch.randn(5, 64).to(torch.bfloat16), torch.randn(5, 48).to(torch.bfloat16)
    before, others_before = layer(values), odd(others)
    packing.pack(model, _kernels_or_none(native))
    assert (layer.weight.numel() == 0) == (native or _on_onednn())
    assert (odd.weight.numel() == 0) == _on_onednn()
    assert torch.allclose(layer(values).float(), before.float(), rtol=2**-7, atol=2**-5)
    assert torch.allclose(odd(others).float(), others_before.float(), rtol=2**-7, atol=2**-5)


@torch.no_grad()
@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("native", [True, False])
def test_without_onednn_the_rest_stays_as_it_is(native: bool) -> None:
    layer, odd = Linear(64, 96, torch.bfloat16), Linear(48, 20, torch.bfloat16)
    moe = MoE(text_config(moe_intermediate_size=32, swiglu_limit=1.0), torch.bfloat16, 8, 3)
    values = torch.randn(5, 48).to(torch.bfloat16)
    before = odd(values)
    packing.pack(nn.ModuleList([layer, odd, moe]), _kernels_or_none(native))
    assert torch.equal(odd(values), before) and odd.packed is None
    assert (layer.packed is not None) == (moe.packed is not None) == native
    assert (moe.experts.gate_up.numel() == 0) == native


@torch.no_grad()
def test_a_float32_projection_is_packed_if_bfloat16_holds_its_weight() -> None:
    exact, inexact = Linear(64, 96, torch.float32), Linear(64, 96, torch.float32)
    exact.weight.data = exact.weight.bfloat16().float()
    values = torch.randn(7, 64).to(torch.bfloat16)
    expected = exact(values), inexact(values)
    packing.pack(nn.ModuleList([exact, inexact]), load())
    assert exact.packed is not None and inexact.packed is None
    assert exact(values).dtype == torch.float32
    assert torch.allclose(exact(values), expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(inexact(values), expected[1])


@torch.no_grad()
def test_groups_are_packed_together() -> None:
    layer = GroupedLinear(64, 32, 3, torch.bfloat16)
    values = torch.randn(9, 3 * 64).to(torch.bfloat16)
    before = layer(values)
    packing.pack(nn.ModuleList([layer]), load())
    assert layer.packed is not None and layer.weight.numel() == 0
    assert torch.allclose(layer(values).float(), before.float(), rtol=2**-7, atol=2**-5)


@torch.no_grad()
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_experts_keep_their_answers(native: bool, tokens: int) -> None:
    moe = MoE(text_config(moe_intermediate_size=32, swiglu_limit=1.0), torch.bfloat16, 8, 3)
    x = torch.randn(tokens, 64).to(torch.bfloat16)
    ids, weights = moe.gate(x, None)
    before = moe(x, ids, weights, RowTiles())
    packing.pack(nn.ModuleList([moe]), _kernels_or_none(native))
    assert (moe.experts.gate_up.numel() == 0) == (native or _on_onednn())
    assert (moe.packed is not None) == native
    after = moe(x, ids, weights, RowTiles())
    assert torch.allclose(after.float(), before.float(), rtol=2**-6, atol=2**-6)


def test_an_arena_keeps_tensors_apart() -> None:
    arena = packing.Arena()
    parts = [torch.arange(n, dtype=torch.int64) for n in (3, 1000, 7, 9_000_000)]
    kept = [arena.keep(part) for part in parts]
    assert all(torch.equal(a, b) for a, b in zip(parts, kept, strict=True))
    assert all(part.data_ptr() % 64 == 0 for part in kept)
