from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vllm_deepinfer.checkpoint import encoding as enc

ALL_BYTES = np.arange(256, dtype=np.uint8)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
ordinary = st.floats(-600, 600, width=32)


def e4m3_by_definition(code: int) -> float:
    """OCP FP8: 1 sign, 4 exponent (bias 7) and 3 mantissa bits; all ones is NaN, no infinity."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e2m1_by_definition(code: int) -> float:
    """OCP MX: 1 sign, 2 exponent (bias 1), 1 mantissa bit."""
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = (code >> 1) & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def nearest_by_search(value: float, values: list[tuple[Fraction, int]], sign_bit: int) -> int:
    """Among all codes of the value's sign the nearest; between two equally near ones the even mantissa."""
    exact, negative = Fraction(value), math.copysign(1.0, value) < 0
    legal = [(held, code) for held, code in values if bool(code & sign_bit) == negative]
    return min(legal, key=lambda pair: (abs(pair[0] - exact), pair[1] & 1))[1]


def nearest_e4m3(value: float) -> int:
    return nearest_by_search(value, E4M3_VALUES, 0x80)


def nearest_e2m1(value: float) -> int:
    return nearest_by_search(value, E2M1_VALUES, 0x8)


E4M3_VALUES = [(Fraction(e4m3_by_definition(code)), code) for code in range(256) if code & 0x7F != 0x7F]
E2M1_VALUES = [(Fraction(e2m1_by_definition(code)), code) for code in range(16)]


def same(left: NDArray[Any], right: list[float]) -> bool:
    """Equal value by value, NaN with NaN, and 0 apart from -0."""
    expected = np.array(right, dtype=np.float32)
    return np.array_equal(left, expected, equal_nan=True) and bool(
        (np.signbit(left) == np.signbit(expected)).all()
    )


def test_decoding_e4m3() -> None:
    decoded = enc.decode_e4m3(ALL_BYTES)
    finite = ~np.isnan(decoded)
    assert same(decoded[finite], [e4m3_by_definition(code) for code in range(256) if code & 0x7F != 0x7F])
    assert np.flatnonzero(~finite).tolist() == [0x7F, 0xFF]


def test_decoding_e2m1() -> None:
    assert same(enc.decode_e2m1(ALL_BYTES[:16]), [e2m1_by_definition(code) for code in range(16)])


def test_decoding_e8m0() -> None:
    assert same(enc.decode_e8m0(ALL_BYTES), [*(2.0 ** (code - 127) for code in range(255)), math.nan])


@given(st.lists(floats | ordinary, min_size=1, max_size=5))
def test_encoding_e4m3(values: list[float]) -> None:
    expected = [nearest_e4m3(value) for value in values]
    assert enc.encode_e4m3(values).tolist() == expected


@given(st.lists(floats | st.floats(-8, 8, width=32), min_size=1, max_size=9))
def test_encoding_e2m1(values: list[float]) -> None:
    expected = [nearest_e2m1(value) for value in values]
    assert enc.encode_e2m1(values).tolist() == expected


def test_every_tie_goes_to_the_even_code() -> None:
    for encode, grid in ((enc.encode_e4m3, enc.E4M3), (enc.encode_e2m1, enc.E2M1)):
        middles = (grid[1:].astype(np.float64) + grid[:-1]) / 2
        lower = np.arange(len(middles))
        assert encode(middles).tolist() == (lower + lower % 2).tolist()
        assert encode(np.nextafter(middles, 0)).tolist() == lower.tolist()
        assert encode(np.nextafter(middles, np.inf)).tolist() == (lower + 1).tolist()


def test_decoding_inverts_encoding() -> None:
    finite = np.array([code for code in range(256) if code & 0x7F != 0x7F], dtype=np.uint8)
    assert enc.encode_e4m3(enc.decode_e4m3(finite)).tolist() == finite.tolist()
    assert enc.encode_e2m1(enc.decode_e2m1(ALL_BYTES[:16])).tolist() == list(range(16))


def test_values_beyond_the_range_saturate() -> None:
    assert enc.decode_e4m3(enc.encode_e4m3([449, 1e30, -500])).tolist() == [448, 448, -448]
    assert enc.decode_e2m1(enc.encode_e2m1([6.1, 1e30, -7])).tolist() == [6, 6, -6]


def bf16_by_search(value: float) -> int:
    """Of the two codes around the value's bits the nearer one, even on a tie."""
    low = int(np.float32(value).view(np.uint32)) >> 16
    near = [low, low + 1]
    exact = [float(np.uint32(code << 16).view(np.float32)) for code in near]
    if math.isinf(exact[1]):  # the middle between the largest value and what would be the next one
        exact[1] = exact[0] * (1 + 2.0**-7 / (2 - 2.0**-7))
    return min(zip(near, exact, strict=True), key=lambda pair: (abs(pair[1] - value), pair[0] & 1))[0]


@given(st.lists(floats, min_size=1))
def test_encoding_bf16(values: list[float]) -> None:
    assert enc.encode_bf16(values).tolist() == [bf16_by_search(value) for value in values]


def test_decoding_bf16() -> None:
    codes = np.arange(0, 0x7F80, dtype=np.uint16)
    assert enc.encode_bf16(enc.decode_bf16(codes)).tolist() == codes.tolist()
    assert enc.decode_bf16(np.array([0x3F80, 0xC000, 0x0001], dtype=np.uint16)).tolist() == [1, -2, 2.0**-133]


@pytest.mark.parametrize("encode", [enc.encode_e4m3, enc.encode_e2m1, enc.encode_bf16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(encode: Callable[[list[float]], Any], bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        encode([1.0, bad])


def blocks(array: NDArray[Any], rows: int) -> list[tuple[tuple[int, int], tuple[slice, slice]]]:
    """Index of every scale and the part of the weight that it covers."""
    return [
        ((i // rows, j // 32), (slice(i, i + rows), slice(j, j + 32)))
        for i in range(0, array.shape[0], rows)
        for j in range(0, array.shape[1], 32)
    ]


def random_weight(rows: int, columns: int, seed: int, decades: float) -> NDArray[np.float32]:
    """Values whose blocks differ in size by many powers of two."""
    generator = np.random.default_rng(seed)
    size = 10 ** generator.uniform(-decades, decades, (rows, columns))
    return (generator.standard_normal((rows, columns)) * size).astype(np.float32)


def smallest_power(maximum: float, largest: float) -> float:
    """The smallest power of two (from 2**-127 on) by which the maximum fits; 1 for zero."""
    if maximum == 0:
        return 1.0
    return next(2.0**power for power in range(-127, 128) if maximum <= largest * 2.0**power)


shapes = st.tuples(st.integers(1, 40), st.integers(1, 3))
decades = st.sampled_from([0.0, 1.0, 8.0])


@given(shape=shapes, columns=st.integers(1, 70), seed=st.integers(0, 999), decades=decades)
def test_dense_weights(shape: tuple[int, int], columns: int, seed: int, decades: float) -> None:
    weight = random_weight(shape[0], columns, seed, decades)
    codes, scale = enc.quantize_dense(weight)
    assert (codes.shape, scale.shape) == (weight.shape, (-(-shape[0] // 32), -(-columns // 32)))
    check_blocks(weight, codes, scale, rows=32)
    assert np.array_equal(enc.dequantize_fp8(codes, scale), by_blocks(codes, scale, rows=32))


@given(shape=shapes, seed=st.integers(0, 999), decades=decades)
def test_rows_of_a_table(shape: tuple[int, int], seed: int, decades: float) -> None:
    weight = random_weight(shape[0], 32 * shape[1], seed, decades)
    codes, scale = enc.quantize_rows(weight)
    assert (codes.shape, scale.shape) == (weight.shape, shape)
    check_blocks(weight, codes, scale, rows=1)
    assert np.array_equal(enc.dequantize_fp8(codes, scale), by_blocks(codes, scale, rows=1))


def check_blocks(weight: NDArray[np.float32], codes: enc.Bytes, scale: enc.Bytes, *, rows: int) -> None:
    for at, part in blocks(weight, rows):
        factor = 2.0 ** (int(scale[at]) - 127)
        assert factor == smallest_power(float(np.abs(weight[part]).max()), 448)
        assert np.array_equal(codes[part], enc.encode_e4m3(weight[part].astype(np.float64) / factor))


def by_blocks(codes: enc.Bytes, scale: enc.Bytes, *, rows: int) -> NDArray[np.float32]:
    out = np.empty(codes.shape, dtype=np.float32)
    for at, part in blocks(codes, rows):
        out[part] = enc.decode_e4m3(codes[part]) * np.float32(2.0 ** (int(scale[at]) - 127))
    return out


@settings(max_examples=25)
@given(shape=shapes, seed=st.integers(0, 999), decades=decades)
def test_experts(shape: tuple[int, int], seed: int, decades: float) -> None:
    weight = random_weight(shape[0], 32 * shape[1], seed, decades)
    packed, scale = enc.quantize_mxfp4(weight)
    assert (packed.dtype.name, packed.shape, scale.shape) == ("int8", (shape[0], 16 * shape[1]), shape)
    restored = enc.dequantize_mxfp4(packed, scale)
    for at, part in blocks(weight, 1):
        factor = 2.0 ** (int(scale[at]) - 127)
        assert factor == smallest_power(float(np.abs(weight[part]).max()), 6)
        expected = [nearest_e2m1(value / factor) for value in weight[part][0].tolist()]
        assert restored[part][0].tolist() == [e2m1_by_definition(code) * factor for code in expected]


def test_the_even_column_is_in_the_low_nibble() -> None:
    weight = np.zeros((1, 32), dtype=np.float32)
    weight[0, :4] = [6, -0.5, 1, 4]  # codes 7, 9, 2, 6 at scale 1
    packed, scale = enc.quantize_mxfp4(weight)
    assert packed.view(np.uint8)[0, :3].tolist() == [0x97, 0x62, 0x00]
    assert scale.tolist() == [[127]]


def test_a_block_of_zeros_has_scale_one() -> None:
    codes, scale = enc.quantize_dense(np.zeros((32, 64)))
    assert scale.tolist() == [[127, 127]]
    assert not codes.any()


def test_scales_at_the_edge_of_the_format() -> None:
    weight = np.zeros((3, 32), dtype=np.float32)
    weight[:, 0] = [448, np.nextafter(np.float32(448), np.float32(500)), 2.0**-140]
    codes, scale = enc.quantize_rows(weight)
    assert scale[:, 0].tolist() == [127, 128, 0]
    assert codes[:, 0].tolist() == [0x7E, enc.encode_e4m3(224.0), enc.encode_e4m3(2.0**-13)]


@given(seed=st.integers(0, 999))
def test_quantising_twice_changes_nothing(seed: int) -> None:
    once = enc.dequantize_fp8(*enc.quantize_dense(random_weight(40, 64, seed, 2.0)))
    assert np.array_equal(enc.dequantize_fp8(*enc.quantize_dense(once)), once)


@pytest.mark.parametrize("quantise", [enc.quantize_rows, enc.quantize_mxfp4])
def test_rows_need_whole_blocks(quantise: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match="whole blocks"):
        quantise(np.ones((2, 48)))


def test_a_scale_that_covers_another_weight() -> None:
    codes, scale = enc.quantize_dense(np.ones((64, 64)))
    with pytest.raises(ValueError, match="covers no weight"):
        enc.dequantize_fp8(codes[:, :32], scale)
    packed, row_scale = enc.quantize_mxfp4(np.ones((4, 64)))
    with pytest.raises(ValueError, match="covers no packed weight"):
        enc.dequantize_mxfp4(packed, row_scale[:, :1])


def test_the_same_bits_as_torch() -> None:
    """A third opinion on single values, where the CPU stack is installed."""
    torch = pytest.importorskip("torch")
    values = np.concatenate([random_weight(64, 64, 0, 3.0).ravel(), [0.0, -0.0, 2.0**-10, 2.0**-9, 447.9]])
    values = np.clip(values, -448, 448).astype(np.float32)
    tensor = torch.from_numpy(values)
    assert np.array_equal(tensor.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), enc.encode_e4m3(values))
    assert np.array_equal(tensor.bfloat16().view(torch.uint16).numpy(), enc.encode_bf16(values))
    codes = torch.arange(256, dtype=torch.uint8)
    e4m3 = codes.view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(e4m3, enc.decode_e4m3(ALL_BYTES), equal_nan=True)
    e8m0 = codes.view(torch.float8_e8m0fnu).float().numpy()
    assert np.array_equal(e8m0, enc.decode_e8m0(ALL_BYTES), equal_nan=True)
