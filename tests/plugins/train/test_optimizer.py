from __future__ import annotations

import pytest
import torch
from torch import nn
from vllm_deepinfer_plugins.train.optimizer import Optimizer, Rates, orthogonal

GENERATOR = torch.Generator()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR.manual_seed(seed))


@pytest.mark.parametrize("shape", [(3, 16, 40), (2, 40, 16), (1, 24, 24)])
def test_singular_values_move_to_one_and_directions_stay(shape: tuple[int, ...]) -> None:
    matrices = random(*shape)
    result = orthogonal(matrices)
    values = torch.linalg.svdvals(result)
    assert bool((values > 0.3).all()) and bool((values < 1.4).all())
    assert torch.linalg.svdvals(matrices).max() > 5
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    overlap = (result * (u @ v)).sum((1, 2)) / (result.norm(dim=(1, 2)) * (u @ v).norm(dim=(1, 2)))
    assert bool((overlap > 0.95).all())


def test_a_stack_is_orthogonalised_matrix_by_matrix() -> None:
    stack = random(2, 32, 16)
    value = nn.Parameter(torch.zeros(2, 32, 16))
    optimizer = Optimizer([("layers.0.ffn.experts.gate_up", value)], 2, Rates(matrix=0.1, decay=0.0))
    value.grad = stack
    optimizer.step(1.0)
    one = stack * (1 - 0.95)
    ahead = stack.lerp(one, 0.95).reshape(4, 16, 16)
    torch.testing.assert_close(value.data, -0.1 * orthogonal(ahead).view(2, 32, 16))


def test_a_tall_matrix_moves_further() -> None:
    value = nn.Parameter(torch.zeros(64, 16))
    optimizer = Optimizer([("layers.0.attn.wq_b.weight", value)], 2, Rates(matrix=0.1, decay=0.0))
    value.grad = random(64, 16)
    optimizer.step(0.5)
    assert 0.3 * 0.05 * 2 < torch.linalg.svdvals(value.data).max() < 1.4 * 0.05 * 2


def test_adam_moves_by_the_rate_at_first() -> None:
    value = nn.Parameter(torch.ones(8))
    optimizer = Optimizer([("norm.weight", value)], 2, Rates(other=0.01))
    value.grad = torch.tensor([1.0, -1, 5, -5, 0.1, -0.1, 0.01, 0])
    optimizer.step(0.5)
    expected = 1 - 0.005 * torch.sign(value.grad)
    torch.testing.assert_close(value.data, expected, atol=1e-5, rtol=0)
    assert "norm.weight.second" in optimizer.state


def test_which_rate_belongs_to_what() -> None:
    names = {
        "embed.weight": "table",
        "layers.1.engram.embed.weight": "table",
        "layers.1.engram.wkv.weight": "matrix",
        "layers.2.attn.compressor.wkv.weight": "matrix",
        "layers.2.attn.compressor.norm.weight": "other",
        "layers.2.attn.indexer.wq_b.weight": "other",
        "layers.2.ffn.gate.weight": "other",
        "layers.2.hc_attn.fn": "other",
        "mtp.0.main_proj.weight": "matrix",
        "mtp.2.markov_head.embed.weight": "other",
    }
    rates = Rates(matrix=0.0, table=0.5, other=0.25, decay=0.0)
    parameters = {name: nn.Parameter(torch.ones(4, 4)) for name in names}
    optimizer = Optimizer(parameters.items(), 2, rates)
    for value in parameters.values():
        value.grad = torch.ones(4, 4)
    optimizer.step(1.0)
    moved = {name: round(1 - value[0, 0].item(), 4) for name, value in parameters.items()}
    assert moved == {name: {"matrix": 0.0, "table": 0.5, "other": 0.25}[kind] for name, kind in names.items()}


def test_what_has_no_gradient_stays() -> None:
    value, bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = Optimizer([("norm.weight", value), ("layers.0.ffn.gate.bias", bias)], 2, Rates())
    optimizer.step(1.0)
    assert torch.equal(value.data, torch.ones(3)) and list(optimizer.parameters) == ["norm.weight"]
