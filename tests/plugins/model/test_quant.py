"""The three cache formats against a search over every value that each of them has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from vllm_deepinfer_plugins.model.quant import BLOCK, CACHE_DTYPE, CacheFormat, quantize_cache

from vllm_deepinfer.checkpoint import encoding

FORMATS: tuple[CacheFormat, ...] = ("fp8", "nvfp4", "mxfp4")
# Values by code, written out from the formats' definitions: sign, exponent, mantissa.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [m / 512 for m in range(8)] + [2.0**e * (1 + m / 8) for e in range(-6, 9) for m in range(8)][:-1]
)
Floats = np.ndarray[Any, Any]


def nearest(values: Floats, magnitudes: Floats) -> Floats:
    """The nearest value of a format by trying all of them; of two as near, the one with the even code."""
    distance = np.abs(np.abs(values.astype(np.float64))[..., None] - magnitudes)
    tied = distance == distance.min(axis=-1, keepdims=True)
    odd = np.arange(len(magnitudes)) % 2
    return np.copysign(magnitudes[np.where(tied, odd, 2).argmin(axis=-1)], values)


def power_of_two_at_least(value: float) -> float:
    power = 2.0**-126
    while power < value:
        power *= 2
    return power


def by_search(row: Floats, fmt: CacheFormat) -> list[float]:
    """One row, block by block, in float64; only nvfp4's divisions are float32's."""
    rounded: list[float] = []
    for start in range(0, len(row), BLOCK[fmt]):
        block = row[start : start + BLOCK[fmt]]
        largest = np.abs(block).max()
        if fmt == "fp8":
            scale = power_of_two_at_least(max(float(largest), 1e-4) / 448)
            codes = nearest(block / scale, E4M3)
        elif fmt == "mxfp4":
            scale = power_of_two_at_least(float(largest) / 6)
            codes = nearest(block.astype(np.float64) / scale, E2M1)
        else:
            scale = float(nearest(np.maximum(largest, np.float32(6 / 512)) / np.float32(6), E4M3))
            codes = nearest(block / np.float32(scale), E2M1)
        rounded += (codes * scale).tolist()
    return rounded


def quantize(values: Floats, fmt: CacheFormat) -> Floats:
    result: Floats = quantize_cache(torch.from_numpy(values), fmt).numpy()
    return result


def row_strategy() -> st.SearchStrategy[Floats]:
    """Rows of 1 to 70 channels: values of one size, of all sizes, and many that lie on or between codes."""
    codes = st.sampled_from([*E2M1.tolist(), 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.0001, 448.0, 464.0])
    tied = st.builds(lambda v, s, p: v * s * 2.0**p, codes, st.sampled_from([1, -1]), st.integers(-3, 3))
    elements = st.one_of(
        st.floats(-300, 300, width=32), st.floats(-1, 1, width=32), tied, st.sampled_from([0.0, -0.0, 1e-6])
    )
    return arrays.arrays(np.float32, st.integers(1, 70), elements=elements)


@pytest.mark.parametrize("fmt", FORMATS)
@given(row=row_strategy())
@settings(max_examples=25)
def test_nearest_value_of_the_format(fmt: CacheFormat, row: Floats) -> None:
    assert quantize(row, fmt).tolist() == by_search(row, fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_normal_rows(fmt: CacheFormat) -> None:
    rows = np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32)
    rows *= np.exp2(np.arange(-20, 20, dtype=np.float32))[:, None] if fmt != "nvfp4" else 1
    assert quantize(rows, fmt).tolist() == [by_search(row, fmt) for row in rows]


@pytest.mark.parametrize("fmt", FORMATS)
@given(row=row_strategy())
@settings(max_examples=25)
def test_bfloat16_holds_every_result(fmt: CacheFormat, row: Floats) -> None:
    rounded = torch.from_numpy(quantize(row, fmt))
    assert torch.equal(rounded.to(CACHE_DTYPE).float(), rounded)
    assert torch.bfloat16 == CACHE_DTYPE


@pytest.mark.parametrize("fmt", FORMATS)
@given(row=row_strategy())
@settings(max_examples=25)
def test_rounding_twice_is_rounding_once(fmt: CacheFormat, row: Floats) -> None:
    if fmt == "nvfp4":  # below, the scale is a subnormal E4M3 and the largest value may not fill its block
        row[:: BLOCK[fmt]] = 6 * 2.0**-6 + np.abs(row[:: BLOCK[fmt]])
    once = quantize(row, fmt)
    assert quantize(once, fmt).tolist() == once.tolist()


@given(row=row_strategy())
@settings(max_examples=25)
def test_the_encoders_of_the_checkpoint_agree(row: Floats) -> None:
    """The released weights use the same two formats; those encoders are numpy and share no code with this."""
    whole = np.resize(row, (1, 32)) + np.float32(1e-3)
    assert (
        quantize(whole, "mxfp4").tolist()
        == encoding.dequantize_mxfp4(*encoding.quantize_mxfp4(whole)).tolist()
    )
    assert quantize(whole, "fp8").tolist() == encoding.dequantize_fp8(*encoding.quantize_rows(whole)).tolist()


@pytest.mark.parametrize(
    ("fmt", "row", "wanted"),
    [
        # The largest magnitude 6 sets scale 1; every midpoint goes to the even code.
        ("mxfp4", [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.75], [6, 0, 1, 1, 2, 2, 4, 4, -1]),
        # 6.1 needs scale 2, in whose steps 1 is 0.5.
        ("mxfp4", [6.1, 1, 0.5], [6, 1, 0]),
        ("fp8", [448, 17, 19, -17], [448, 16, 20, -16]),
        ("fp8", [449, 17], [448, 16]),
        # Scale 12 / 6 = 2 is an E4M3 value.
        ("nvfp4", [12, 0.5, 1.5, 5], [12, 0, 2, 4]),
        # 6.3 / 6 = 1.05 rounds to the E4M3 value 1.0, and 6.3 is clipped at 6.
        ("nvfp4", [6.3, 5.1], [6, 6]),
        ("fp8", [0, 0, 0], [0, 0, 0]),
        ("nvfp4", [0, 0, 0], [0, 0, 0]),
        ("mxfp4", [0, 0, 0], [0, 0, 0]),
    ],
)
def test_by_hand(fmt: CacheFormat, row: list[float], wanted: list[float]) -> None:
    assert quantize(np.array(row, np.float32), fmt).tolist() == wanted


@pytest.mark.parametrize("fmt", FORMATS)
def test_blocks_do_not_see_each_other(fmt: CacheFormat) -> None:
    block = BLOCK[fmt]
    row = np.random.default_rng(1).normal(size=3 * block + 5).astype(np.float32)
    row[:block] *= 1000
    parts = [quantize(row[start : start + block].copy(), fmt) for start in range(0, len(row), block)]
    assert quantize(row, fmt).tolist() == np.concatenate(parts).tolist()


@pytest.mark.parametrize("fmt", FORMATS)
def test_any_leading_axes_and_dtype(fmt: CacheFormat) -> None:
    values = torch.randn(2, 3, 4, 48, generator=torch.Generator().manual_seed(2)).bfloat16()
    rounded = quantize_cache(values, fmt)
    assert (rounded.dtype, rounded.shape) == (torch.bfloat16, values.shape)
    assert torch.equal(rounded.float(), quantize_cache(values.float(), fmt))
    assert torch.equal(rounded[1, 2, 3], quantize_cache(values[1, 2, 3], fmt))
    assert torch.equal(rounded.transpose(0, 1), quantize_cache(values.transpose(0, 1), fmt))


@pytest.mark.parametrize("fmt", FORMATS)
def test_large_values_stay_finite(fmt: CacheFormat) -> None:
    largest = 6.0 * 448
    rounded = quantize_cache(torch.tensor([1e5, -1e5, 1.0]), fmt)
    assert torch.isfinite(rounded).all()
    assert rounded[0] == -rounded[1] > 0
    if fmt == "nvfp4":
        assert rounded[0] == largest, "the largest E4M3 scale times the largest E2M1 value"


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_gradient_passes_straight_through(fmt: CacheFormat) -> None:
    values = torch.randn(3, 40, generator=torch.Generator().manual_seed(3), requires_grad=True)
    factor = torch.randn(3, 40, generator=torch.Generator().manual_seed(4))
    rounded = quantize_cache(values, fmt)
    (rounded * factor).sum().backward()
    assert values.grad is not None and torch.equal(values.grad, factor)
    with torch.no_grad():
        assert torch.equal(rounded, quantize_cache(values, fmt))
