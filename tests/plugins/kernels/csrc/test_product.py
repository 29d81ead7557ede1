"""Packed products against float64, at the edges of tiles (16, 32) and of cached row chunks (256)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_deepinfer_plugins.kernels import Kernels

from ..samples import assert_near, noise
from ..variants import threads

ROWS = [1, 4, 15, 16, 17, 31, 32, 33, 128, 255, 256, 257]


def by_hand(x: torch.Tensor, weight: torch.Tensor, groups: int = 1) -> torch.Tensor:
    parts = zip(x.double().chunk(groups, dim=-1), weight.double().chunk(groups), strict=True)
    return torch.cat([part @ own.T for part, own in parts], dim=-1)


def test_the_packed_form_by_index() -> None:
    weight = noise(96, 64)
    packed = Kernels.pack(weight)
    assert packed.shape == (3, 32, 32, 2) and packed.is_contiguous()
    for output, channel in [(0, 0), (31, 63), (32, 1), (95, 62), (40, 17)]:
        block, within = divmod(output, 32)
        assert packed[block, channel // 2, within, channel % 2] == weight[output, channel]
    assert torch.equal(Kernels.pack(torch.stack((weight, -weight)))[1], -packed)


@pytest.mark.parametrize(("sides", "packs"), [((32, 64), True), ((5, 32, 32), True), ((48, 32), False)])
def test_what_has_a_packed_form(sides: tuple[int, ...], packs: bool) -> None:
    assert Kernels.packs(torch.empty(sides)) is packs
    assert Kernels.packs(torch.empty(*sides[:-2], sides[-1], sides[-2])) is packs


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_rows_of_a_product(kernels: Kernels, rows: int, wide: bool) -> None:
    x, weight = noise(rows, 96, seed=rows), noise(64, 96, seed=1)
    found = kernels.linear(x, kernels.pack(weight), wide=wide)
    assert found.dtype == (torch.float32 if wide else torch.bfloat16)
    assert_near(found, by_hand(x, weight), slack=1e-4)


@pytest.mark.parametrize(
    ("outputs", "inputs", "groups"), [(32, 32, 1), (96, 512, 3), (256, 64, 8), (64, 1024, 2)]
)
def test_sides_and_groups(kernels: Kernels, outputs: int, inputs: int, groups: int) -> None:
    x, weight = noise(19, groups * inputs), noise(outputs, inputs, seed=1)
    found = kernels.linear(x, kernels.pack(weight), groups=groups)
    assert_near(found, by_hand(x, weight, groups), slack=1e-4)


def test_shapes_around_the_channels(kernels: Kernels) -> None:
    weight, wide = noise(32, 64, seed=1), noise(7, 3, 96)
    packed = kernels.pack(weight)
    assert_near(kernels.linear(wide[..., 32:], packed), by_hand(wide[..., 32:], weight), slack=1e-4)
    turned = noise(64, 9).T
    assert_near(kernels.linear(turned, packed), by_hand(turned, weight), slack=1e-4)
    assert kernels.linear(wide[:0, :, 32:], packed).shape == (0, 3, 32)
    with pytest.raises(AssertionError):
        kernels.linear(noise(2, 3 * 64), packed, groups=3)


@given(rows=st.lists(st.integers(0, 269), min_size=1, max_size=40), wide=st.booleans())
@settings(max_examples=12)
def test_a_row_has_the_same_bits_in_any_company(kernels: Kernels, rows: list[int], wide: bool) -> None:
    x, packed = noise(270, 160), kernels.pack(noise(64, 160, seed=1))
    whole = kernels.linear(x, packed, wide=wide)
    assert torch.equal(kernels.linear(x[rows], packed, wide=wide), whole[rows])
    with threads(2):
        assert torch.equal(kernels.linear(x, packed, wide=wide), whole)


def test_nan_and_infinity_stay_in_their_row(kernels: Kernels) -> None:
    x, weight = noise(40, 64), noise(32, 64, seed=1)
    x[3, 5], x[20, 0], x[39, 63] = torch.nan, torch.inf, -torch.inf
    found = kernels.linear(x, kernels.pack(weight))
    others = [row for row in range(40) if row not in (3, 20, 39)]
    assert found[3].isnan().all() and torch.equal(found[20].sign(), weight[:, 0].sign())
    assert torch.equal(found[39].sign(), -weight[:, 63].sign()) and found[[20, 39]].isinf().all()
    assert_near(found[others], by_hand(x, weight)[others], slack=1e-4)
