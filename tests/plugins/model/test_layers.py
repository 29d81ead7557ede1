"""The small modules against their formulas, one row at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from vllm_deepinfer_plugins.model.layers import GroupedLinear, Linear, RMSNorm

from .samples import noise


def test_rms_norm_by_hand() -> None:
    norm = RMSNorm(4, 1e-20, torch.float32)
    norm.weight.data = torch.tensor([1.0, 2.0, -1.0, 0.5])
    row = [3.0, -1.0, 2.0, 0.0]
    root = math.sqrt(14 / 4)
    wanted = [3 / root, -2 / root, -2 / root, 0]
    assert norm(torch.tensor([row, [10 * x for x in row]])).tolist() == [pytest.approx(wanted)] * 2


@pytest.mark.parametrize("size", [1e-7, 1e-4, 1.0, 1e8])
def test_rms_norm_of_any_size(size: float) -> None:
    """An eps of 1e-6 would flatten small rows; 1e-20 does not."""
    norm, row = RMSNorm(64, 1e-20, torch.float32), noise(64)
    torch.testing.assert_close(norm(row * size), norm(row), rtol=1e-5, atol=1e-6)


def test_eps_counts_where_it_is_large() -> None:
    assert RMSNorm(2, 3.0, torch.float32)(torch.tensor([1.0, 1.0])).tolist() == [0.5, 0.5]


def test_rms_norm_computes_in_float32() -> None:
    norm = RMSNorm(64, 1e-20, torch.bfloat16)
    norm.weight.data = noise(64, seed=1, dtype=torch.bfloat16)
    rows = (
        noise(7, 64, dtype=torch.bfloat16) * 1e-15
    )  # whose squares bfloat16 could hold, but eps would not fit
    wide = rows.double()
    wanted = norm.weight.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-20).sqrt()
    found = norm(rows)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-9)


def test_linear_computes_in_its_weights_dtype() -> None:
    wide = Linear(8, 3, torch.float32)
    rows = noise(5, 8, dtype=torch.bfloat16)
    assert wide.bias is None
    found = wide(rows)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, rows.float() @ wide.weight.T, rtol=1e-6, atol=1e-6)
    assert Linear(8, 3, torch.bfloat16)(noise(5, 8)).dtype == torch.bfloat16


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_linear_group_by_group(groups: int) -> None:
    layer = GroupedLinear(6, 5, groups, torch.float32)
    assert layer.weight.shape == (groups * 5, 6)
    rows = noise(7, groups * 6)
    found = layer(rows)
    assert found.shape == (7, groups * 5)
    for group in range(groups):
        part, weight = rows[:, group * 6 : group * 6 + 6], layer.weight[group * 5 : group * 5 + 5]
        torch.testing.assert_close(found[:, group * 5 : group * 5 + 5], part @ weight.T)


def test_grouped_linear_is_a_block_diagonal_linear() -> None:
    layer, rows = GroupedLinear(4, 3, 3, torch.float32), noise(5, 12)
    dense = torch.block_diag(*layer.weight.unflatten(0, (3, -1)))
    torch.testing.assert_close(layer(rows), nn.functional.linear(rows, dense))


def test_gradients_reach_every_weight() -> None:
    rows = noise(5, 12).requires_grad_()
    norm, grouped = RMSNorm(12, 1e-20, torch.float32), GroupedLinear(4, 3, 3, torch.float32)
    last = Linear(9, 2, torch.float32)
    last(grouped(norm(rows))).square().sum().backward()
    for tensor in (rows, norm.weight, grouped.weight, last.weight):
        assert tensor.grad is not None and float(tensor.grad.abs().min()) >= 0 and tensor.grad.abs().sum() > 0
