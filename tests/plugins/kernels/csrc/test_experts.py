"""Routed experts against a loop over tokens and picks, with the roundings where the model has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from vllm_deepinfer_plugins.kernels import Kernels

from ..samples import assert_near, noise
from ..variants import threads

HIDDEN, WIDTH = 64, 32


def layer(experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    scale = HIDDEN**-0.5
    return noise(experts, 2 * WIDTH, HIDDEN, seed=1) * scale, noise(experts, HIDDEN, WIDTH, seed=2) * scale


def by_hand(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: Any, limit: float
) -> torch.Tensor:
    result = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            both = (layer[0][expert].double() @ x[token].double()).bfloat16().double()
            gate, up = both[:WIDTH], both[WIDTH:]
            if limit:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            inner = (F.silu(gate) * up * weight).bfloat16().double()
            result[token] += layer[1][expert].double() @ inner
    return result


def call(
    kernels: Kernels, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: Any, limit: float
) -> torch.Tensor:
    return kernels.experts(x, ids, weights, kernels.pack(layer[0]), kernels.pack(layer[1]), limit)


def picks(tokens: int, chosen: int, experts: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).topk(chosen).indices
    return ids, torch.rand(tokens, chosen, generator=generator)


@pytest.mark.parametrize("limit", [0.0, 0.5, 10.0])
@pytest.mark.parametrize(
    ("tokens", "chosen", "experts"), [(1, 1, 1), (1, 3, 8), (4, 6, 7), (33, 2, 5), (70, 3, 9)]
)
def test_each_token_through_its_experts(
    kernels: Kernels, tokens: int, chosen: int, experts: int, limit: float
) -> None:
    x, parts = noise(tokens, HIDDEN, seed=tokens), layer(experts)
    ids, weights = picks(tokens, chosen, experts)
    found = call(kernels, x, ids, weights, parts, limit)
    assert_near(found, by_hand(x, ids, weights, parts, limit), slack=4e-3)


@pytest.mark.parametrize("rows", [31, 32, 33, 65, 100])
def test_all_rows_at_one_expert_and_none_at_others(kernels: Kernels, rows: int) -> None:
    x, parts, ids = noise(rows, HIDDEN), layer(6), torch.full((rows, 1), 4)
    weights = torch.ones(rows, 1)
    assert_near(call(kernels, x, ids, weights, parts, 0), by_hand(x, ids, weights, parts, 0), slack=4e-3)


def test_an_expert_taken_twice_counts_twice(kernels: Kernels) -> None:
    x, parts = noise(2, HIDDEN), layer(3)
    ids, weights = torch.tensor([[2, 2], [0, 0]]), torch.tensor([[0.5, 0.25], [1.0, 0.0]])
    assert_near(call(kernels, x, ids, weights, parts, 0), by_hand(x, ids, weights, parts, 0), slack=4e-3)


def test_the_limit_holds(kernels: Kernels) -> None:
    """One channel through: gate and up are 8 and −8, clamped to 2 and −2."""
    x, gate_up = torch.zeros(1, HIDDEN, dtype=torch.bfloat16), torch.zeros(1, 2 * WIDTH, HIDDEN).bfloat16()
    down = torch.zeros(1, HIDDEN, WIDTH).bfloat16()
    x[0, 0], gate_up[0, 0, 0], gate_up[0, WIDTH, 0], down[0, 5, 0] = 1, 8, -8, 1
    one = torch.zeros(1, 1, dtype=torch.int64)
    for limit, wanted in [(2.0, F.silu(torch.tensor(2.0)) * -2), (0.0, F.silu(torch.tensor(8.0)) * -8)]:
        found = call(kernels, x, one, torch.ones(1, 1), (gate_up, down), limit)
        assert float(found[0, 5]) == float(wanted.bfloat16()) and found.count_nonzero() == 1


def test_no_tokens(kernels: Kernels) -> None:
    ids, weights = torch.empty(0, 3, dtype=torch.int64), torch.empty(0, 3)
    assert call(kernels, noise(0, HIDDEN), ids, weights, layer(4), 0).shape == (0, HIDDEN)


def test_a_row_has_the_same_bits_in_any_company(kernels: Kernels) -> None:
    x, parts, (ids, weights) = noise(90, HIDDEN), layer(5), picks(90, 3, 5)
    whole = call(kernels, x, ids, weights, parts, 10.0)
    for rows in ([0], [89], [44, 3, 3, 80], list(range(89, -1, -1))):
        assert torch.equal(call(kernels, x[rows], ids[rows], weights[rows], parts, 10.0), whole[rows])
    with threads(2):
        assert torch.equal(call(kernels, x, ids, weights, parts, 10.0), whole)


def test_nan_stays_in_its_row(kernels: Kernels) -> None:
    x, parts, (ids, weights) = noise(40, HIDDEN), layer(5), picks(40, 2, 5)
    clean = call(kernels, x, ids, weights, parts, 10.0)
    x[7, 3], x[8, 0] = torch.nan, torch.inf
    found = call(kernels, x, ids, weights, parts, 10.0)
    assert found[7].isnan().all()
    assert torch.equal(found[9:], clean[9:]) and torch.equal(found[:7], clean[:7])
