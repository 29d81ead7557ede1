"""Random weights keep the scale of what they multiply, and are the same in every run."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from vllm_deepinfer_plugins.bench import random_weights  # noqa: E402
from vllm_deepinfer_plugins.bench.random_weights import fill  # noqa: E402


@pytest.mark.parametrize(
    ("name", "shape", "deviation"),
    [
        ("model.layers.0.attn.wq_b.weight", (256, 64), 1 / 8),
        ("model.layers.0.ffn.experts.w13_weight", (4, 64, 256), 1 / 16),
        ("model.embed_tokens.weight", (512, 64), 1.0),
        ("model.layers.1.attn.attn_sink", (4096,), 0.1),
        ("model.layers.1.hc_attn_fn", (24, 1024), 1 / 32),
    ],
)
def test_scale(name: str, shape: tuple[int, ...], deviation: float) -> None:
    tensor = torch.full(shape, math.nan)
    fill(name, tensor)
    assert tensor.std().item() == pytest.approx(deviation, rel=0.05)
    assert tensor.mean().item() == pytest.approx(0.0, abs=4 * deviation / math.sqrt(tensor.numel()))


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.attn.q_norm.weight"])
def test_norms_are_one(name: str) -> None:
    tensor = torch.zeros(8)
    fill(name, tensor)
    assert tensor.tolist() == [1.0] * 8


def test_integers_stay() -> None:
    tensor = torch.arange(4)
    fill("model.layers.0.ffn.gate.tid2eid", tensor)
    assert tensor.tolist() == [0, 1, 2, 3]


def test_the_same_name_gets_the_same_values_and_another_name_others() -> None:
    first, second, other = (torch.empty(16, 16) for _ in range(3))
    fill("a.weight", first)
    fill("a.weight", second)
    fill("b.weight", other)
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_bfloat16_is_the_rounded_float32() -> None:
    exact, rounded = torch.empty(16, 16), torch.empty(16, 16, dtype=torch.bfloat16)
    fill("a.weight", exact)
    fill("a.weight", rounded)
    assert torch.equal(exact.to(torch.bfloat16), rounded)


def test_register_teaches_vllm_the_format_and_can_be_repeated() -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    random_weights.register()
    random_weights.register()
    loader = get_model_loader(LoadConfig(load_format=random_weights.LOAD_FORMAT))
    model = torch.nn.Module()
    model.norm = torch.nn.LayerNorm(4)
    model.proj = torch.nn.Linear(256, 64)
    loader.load_weights(model, None)
    assert model.norm.weight.tolist() == [1.0] * 4
    assert model.proj.weight.std().item() == pytest.approx(1 / 16, rel=0.05)
    assert torch.count_nonzero(model.proj.bias) == 64
