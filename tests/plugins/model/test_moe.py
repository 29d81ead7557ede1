"""Router and experts against a loop over tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F
from vllm_deepinfer_plugins.model.moe import MoE, RoutedExperts, Router, SharedExpert, swiglu
from vllm_deepinfer_plugins.model.tiles import RowTiles

from .samples import noise, text_config

EXPERTS, CHOSEN = 8, 3
DTYPES = [torch.float32, torch.bfloat16]


def router(**changes: object) -> Router:
    module = Router(text_config(**changes), EXPERTS, CHOSEN)
    module.weight.data = noise(EXPERTS, 64, seed=1) / 8
    return module


def scores_of(module: Router, x: torch.Tensor) -> list[float]:
    """sqrt(softplus(w · x)) of each expert."""
    products = (module.weight.double() @ x.double()).tolist()
    return [math.sqrt(math.log1p(math.exp(product))) for product in products]


def test_scores_renormalised_and_scaled_one_token_at_a_time() -> None:
    module, x = router(), noise(12, 64)
    experts, weights = module(x, None)
    for token in range(12):
        scores = scores_of(module, x[token])
        best = sorted(range(EXPERTS), key=lambda expert: -scores[expert])[:CHOSEN]
        assert sorted(experts[token].tolist()) == sorted(best)
        total = sum(scores[expert] for expert in best)
        wanted = [1.5 * scores[expert] / total for expert in experts[token].tolist()]
        assert weights[token].tolist() == pytest.approx(wanted, rel=1e-5)
        assert weights[token].sum().item() == pytest.approx(1.5)


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_without_renormalisation_the_scores_themselves(scale: float) -> None:
    module, x = router(norm_topk_prob=False, routed_scaling_factor=scale), noise(4, 64)
    experts, weights = module(x, None)
    for token in range(4):
        scores = scores_of(module, x[token])
        wanted = [scale * scores[expert] for expert in experts[token].tolist()]
        assert weights[token].tolist() == pytest.approx(wanted, rel=1e-5)


def test_the_bias_moves_the_selection_only() -> None:
    module, x = router(), noise(6, 64)
    module.bias.data[5] = 100
    experts, weights = module(x, None)
    for token in range(6):
        chosen = experts[token].tolist()
        assert 5 in chosen
        scores = scores_of(module, x[token])
        total = sum(scores[expert] for expert in chosen)
        assert weights[token].tolist() == pytest.approx([1.5 * scores[e] / total for e in chosen], rel=1e-5)


def test_image_positions_have_a_bias_of_their_own() -> None:
    module, x = router(), noise(1, 64).expand(4, -1)
    text, vision = sorted(set(range(EXPERTS)) - set(module(x, None)[0][0].tolist()))[:2]
    module.bias.data[text], module.bias_vl.data[vision] = 100, 100
    experts = module(x, torch.tensor([False, True, True, False]))[0].tolist()
    assert [text in row for row in experts] == [True, False, False, True]
    assert [vision in row for row in experts] == [False, True, True, False]
    assert torch.equal(module(x, None)[0], module(x, torch.zeros(4).bool())[0])


def test_router_computes_in_float32() -> None:
    module, x = router(), noise(5, 64, dtype=torch.bfloat16)
    experts, weights = module(x, None)
    assert weights.dtype == torch.float32
    wanted_experts, wanted = module(x.float(), None)
    assert torch.equal(experts, wanted_experts) and torch.equal(weights, wanted)


@pytest.mark.parametrize(
    ("gate", "up", "wanted"),
    [
        (20.0, 1.0, 10 / (1 + math.exp(-10))),  # the gate is clamped from above
        (-20.0, 1.0, -20 / (1 + math.exp(20))),  # and not from below
        (1.0, 20.0, 10 / (1 + math.exp(-1))),  # the other factor on both sides
        (1.0, -20.0, -10 / (1 + math.exp(-1))),
        (1.0, 3.0, 3 / (1 + math.exp(-1))),
    ],
)
def test_clamps(gate: float, up: float, wanted: float) -> None:
    found = swiglu(torch.tensor([[gate]]), torch.tensor([[up]]), 10.0)
    assert float(found) == pytest.approx(wanted, rel=1e-5)
    doubled = swiglu(torch.tensor([[gate]]), torch.tensor([[up]]), 10.0, torch.tensor([[2.0]]))
    assert float(doubled) == pytest.approx(2 * wanted, rel=1e-5)


def test_a_limit_of_zero_clamps_nothing() -> None:
    assert float(swiglu(torch.tensor([[30.0]]), torch.tensor([[-40.0]]), 0.0)) == pytest.approx(-1200)


def stacked(dtype: torch.dtype, limit: float = 10.0) -> RoutedExperts:
    torch.manual_seed(0)
    return RoutedExperts(text_config(swiglu_limit=limit), EXPERTS, dtype)


def one_expert(module: RoutedExperts, expert: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One token through one expert, rounded where the module's dtype rounds."""
    width = module.gate_up.shape[1] // 2
    gate, up = F.linear(x, module.gate_up[expert, :width]), F.linear(x, module.gate_up[expert, width:])
    gate, up = gate.float(), up.float()
    if module.limit:
        gate, up = gate.clamp(max=module.limit), up.clamp(-module.limit, module.limit)
    return F.linear((F.silu(gate) * up * weight).to(x.dtype), module.down[expert]).float()


@pytest.mark.parametrize("tile", [None, 32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 45])
def test_experts_one_token_at_a_time(tokens: int, dtype: torch.dtype, tile: int | None) -> None:
    module, x = stacked(dtype, limit=0.5), noise(tokens, 64, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    experts = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(tokens)])
    weights = torch.rand(tokens, CHOSEN, generator=generator)
    with torch.no_grad():
        found = module(x, experts, weights, RowTiles(tile))
        wanted = torch.zeros(tokens, 64)
        for token in range(tokens):
            for expert, weight in zip(experts[token].tolist(), weights[token], strict=True):
                wanted[token] += one_expert(module, expert, x[token], weight)
    assert found.dtype == dtype
    precise = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 1e-2}
    torch.testing.assert_close(found.float(), wanted, **precise)


def test_the_order_of_a_tokens_experts_does_not_matter() -> None:
    module, x = stacked(torch.float32), noise(9, 64)
    experts, weights = torch.tensor([[0, 3, 7]]).expand(9, -1), torch.tensor([[0.5, 0.25, 1.0]]).expand(9, -1)
    found = module(x, experts, weights, RowTiles())
    assert torch.equal(found, module(x, experts.flip(1), weights.flip(1), RowTiles()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_expert(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, x = SharedExpert(text_config(swiglu_limit=0.5), dtype), noise(5, 64, dtype=dtype)
    with torch.no_grad():
        found = module(x)
        hidden = swiglu(F.linear(x, module.w1.weight), F.linear(x, module.w3.weight), 0.5)
        wanted = F.linear(hidden, module.w2.weight)
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-2 if dtype == torch.bfloat16 else 1e-6)


def test_gradients_reach_experts_and_router_but_no_bias() -> None:
    torch.manual_seed(0)
    module, x = MoE(text_config(), torch.float32, EXPERTS, CHOSEN), noise(40, 64).requires_grad_()
    experts, weights = module.gate(x, None)
    (module.experts(x, experts, weights, RowTiles()) + module.shared_experts(x)).square().sum().backward()
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert {"gate.bias", "gate.bias_vl"} == {name for name, _ in module.named_parameters()} - trained
    for name, parameter in module.named_parameters():
        if name in trained:
            assert parameter.grad is not None and float(parameter.grad.abs().sum()) > 0, name
