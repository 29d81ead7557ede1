"""The number formats of the released weights, in numpy: encoders, decoders and block scales.

A weight is cut into blocks that share one power-of-two scale (E8M0). Dense projections are FP8 E4M3 with a
scale per 32×32 block, Engram rows FP8 with a scale per row and 32 columns, routed experts E2M1 (MXFP4) with a
scale per row and 32 columns, two columns in a byte.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

BLOCK = 32
_SCALE_BIAS = 127  # E8M0 holds an exponent and nothing else; 255 is its NaN


def _e4m3_grid() -> Floats:
    """The finite magnitudes of E4M3 by code, 0 to 0x7e: exponent bias 7, subnormal below 2**-6."""
    codes = np.arange(0x7F)
    exponent, mantissa = codes >> 3, codes & 7
    normal = (8 + mantissa) * np.exp2(exponent - 10.0)
    return np.where(exponent == 0, mantissa * 2.0**-9, normal).astype(np.float32)


E4M3 = _e4m3_grid()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
E4M3_MAX, E2M1_MAX = float(E4M3[-1]), float(E2M1[-1])
_E4M3_VALUES = np.concatenate([E4M3, [np.nan], -E4M3, [np.nan]]).astype(np.float32)
_E2M1_VALUES = np.concatenate([E2M1, -E2M1]).astype(np.float32)
_E8M0_VALUES = np.array([*(2.0 ** (code - _SCALE_BIAS) for code in range(255)), np.nan], dtype=np.float32)


def encode_e4m3(values: ArrayLike) -> Bytes:
    """Round to the nearest E4M3 value, ties to the even code, magnitudes above 448 to 448."""
    return _encode(values, E4M3, sign_bit=0x80)


def decode_e4m3(codes: Bytes) -> Floats:
    """The float32 value of each E4M3 code."""
    values: Floats = _E4M3_VALUES[codes]
    return values


def encode_e2m1(values: ArrayLike) -> Bytes:
    """Round to the nearest E2M1 value, ties to the even code, magnitudes above 6 to 6; a byte per code."""
    return _encode(values, E2M1, sign_bit=0x8)


def decode_e2m1(codes: Bytes) -> Floats:
    """The float32 value of each 4-bit E2M1 code."""
    values: Floats = _E2M1_VALUES[codes]
    return values


def _encode(values: ArrayLike, grid: Floats, *, sign_bit: int) -> Bytes:
    """Nearest code on a grid of magnitudes whose index is the code: an even index is an even mantissa."""
    array = np.asarray(values, dtype=np.float64)
    if not np.isfinite(array).all():
        raise ValueError("weights must be finite to be quantised")
    magnitude = np.abs(array)
    middles = (grid[1:].astype(np.float64) + grid[:-1]) / 2
    codes = np.searchsorted(middles, magnitude, side="left")  # a tie goes down here
    tie = (codes < len(middles)) & (magnitude == middles[np.minimum(codes, len(middles) - 1)])
    codes = codes + (tie & (codes % 2 == 1))
    signed: Bytes = np.where(np.signbit(array), codes | sign_bit, codes).astype(np.uint8)
    return signed


def encode_bf16(values: ArrayLike) -> NDArray[np.uint16]:
    """Round float32 to bfloat16, ties to even; the upper half of the float32 bits."""
    array = np.ascontiguousarray(values, dtype=np.float32)
    if not np.isfinite(array).all():
        raise ValueError("weights must be finite to be encoded")
    bits = array.view(np.uint32).astype(np.uint64)
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def decode_bf16(codes: NDArray[np.uint16]) -> Floats:
    """The float32 value of each bfloat16 code."""
    return (codes.astype(np.uint32) << 16).view(np.float32)


def decode_e8m0(codes: Bytes) -> Floats:
    """The power of two of each scale code; 255 is NaN."""
    values: Floats = _E8M0_VALUES[codes]
    return values


def _scale_codes(maximum: NDArray[np.float64], largest: float) -> Bytes:
    """The smallest power of two that keeps a block's maximum within the format; 1 for a block of zeros."""
    mantissa, exponent = np.frexp(maximum / largest)
    power = np.where(mantissa > 0.5, exponent, exponent - 1)
    power = np.where(maximum == 0, 0, np.clip(power, -_SCALE_BIAS, _SCALE_BIAS))
    codes: Bytes = (power + _SCALE_BIAS).astype(np.uint8)
    return codes


def quantize_dense(weight: ArrayLike) -> tuple[Bytes, Bytes]:
    """FP8 with one scale per 32×32 block; blocks at the edges may be smaller.

    Args:
        weight: [rows, columns].

    Returns:
        E4M3 codes [rows, columns] and E8M0 codes [ceil(rows / 32), ceil(columns / 32)].
    """
    return _quantize_e4m3(weight, row_block=BLOCK)


def quantize_rows(weight: ArrayLike) -> tuple[Bytes, Bytes]:
    """FP8 with one scale per row and 32 columns, as Engram tables are stored.

    Args:
        weight: [rows, columns], columns a multiple of 32.

    Returns:
        E4M3 codes [rows, columns] and E8M0 codes [rows, columns / 32].
    """
    _require_whole_blocks(np.shape(weight))
    return _quantize_e4m3(weight, row_block=1)


def quantize_mxfp4(weight: ArrayLike) -> tuple[NDArray[np.int8], Bytes]:
    """MXFP4: E2M1 with one scale per row and 32 columns, as routed experts are stored.

    Args:
        weight: [rows, columns], columns a multiple of 32.

    Returns:
        Packed codes, int8 [rows, columns / 2], the even column in the low nibble, and E8M0 codes [rows,
        columns / 32].
    """
    _require_whole_blocks(np.shape(weight))
    array = np.asarray(weight, dtype=np.float64)
    scale = _scale_codes(_block_maximum(array, 1), E2M1_MAX)
    codes = encode_e2m1(array / _spread(scale, array.shape, 1))
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed.view(np.int8), scale


def dequantize_fp8(codes: Bytes, scale: Bytes) -> Floats:
    """Invert ``quantize_dense`` and ``quantize_rows``; the scale's shape tells which of them it was.

    Raises:
        ValueError: The scale covers neither 32×32 blocks nor 32 columns of single rows.
    """
    rows, columns = codes.shape
    for row_block in (1, BLOCK):
        if scale.shape == (-(-rows // row_block), -(-columns // BLOCK)):
            return (decode_e4m3(codes) * _spread(scale, codes.shape, row_block)).astype(np.float32)
    raise ValueError(f"a scale of shape {scale.shape} covers no weight of shape {codes.shape}")


def dequantize_mxfp4(packed: NDArray[np.int8], scale: Bytes) -> Floats:
    """Invert ``quantize_mxfp4``: [rows, columns / 2] bytes and [rows, columns / 32] scales to [rows,
    columns].

    Raises:
        ValueError: The scale does not cover the weight.
    """
    rows, columns = packed.shape[0], packed.shape[1] * 2
    if scale.shape != (rows, columns // BLOCK) or columns % BLOCK:
        raise ValueError(f"a scale of shape {scale.shape} covers no packed weight of shape {packed.shape}")
    raw = packed.view(np.uint8)
    codes = np.stack([raw & 15, raw >> 4], axis=-1).reshape(rows, columns)
    return (decode_e2m1(codes) * _spread(scale, codes.shape, 1)).astype(np.float32)


def _quantize_e4m3(weight: ArrayLike, *, row_block: int) -> tuple[Bytes, Bytes]:
    array = np.asarray(weight, dtype=np.float64)
    scale = _scale_codes(_block_maximum(array, row_block), E4M3_MAX)
    return encode_e4m3(array / _spread(scale, array.shape, row_block)), scale


def _block_maximum(array: NDArray[np.float64], row_block: int) -> NDArray[np.float64]:
    by_row = np.maximum.reduceat(np.abs(array), np.arange(0, array.shape[0], row_block), axis=0)
    maximum: NDArray[np.float64] = np.maximum.reduceat(by_row, np.arange(0, array.shape[1], BLOCK), axis=1)
    return maximum


def _spread(scale: Bytes, shape: tuple[int, ...], row_block: int) -> Floats:
    """The scale of every element, cut to the weight's shape."""
    values = decode_e8m0(scale).repeat(row_block, axis=0).repeat(BLOCK, axis=1)
    return values[: shape[0], : shape[1]]


def _require_whole_blocks(shape: tuple[int, ...]) -> None:
    if len(shape) != 2 or shape[1] % BLOCK:
        raise ValueError(
            f"a weight with one scale per {BLOCK} columns needs whole blocks, not the shape {shape}"
        )
