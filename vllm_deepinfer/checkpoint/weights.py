"""Random weights under which every path of the model matters, and their stored forms.

vLLM's dummy weights (±1e-3) make the output ignore the context. These are of the size that training would
give them: normalised activations stay near 1 through every layer, gates, sinks, mixers and biases differ from
their neutral values, and the logits spread widely enough that a change far back in the context moves the
choice of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from .encoding import encode_bf16, quantize_dense, quantize_mxfp4, quantize_rows
from .files import Header
from .layout import Encoding
from .tensors import Entry, Kind, quantised_shapes, scale_name

LOGIT_SPREAD = 4.0  # standard deviation of the logits over the vocabulary

_TERMS = 4  # 16-bit uniforms per draw; their sum is close to normal within 3.4 standard deviations
_MEAN = _TERMS * (2**16 - 1) / 2
_DEVIATION = math.sqrt(_TERMS * (2**32 - 1) / 12)


def random_values(name: str, entry: Entry, seed: int) -> NDArray[np.float32]:
    """The values of one tensor, which depend on its name, its shape and the seed alone."""
    noise = standard_noise(entry.shape, seed=seed, name=name)
    mean, spread = _mean_and_spread(name, entry)
    values: NDArray[np.float32] = (mean + spread * noise).astype(np.float32)
    return values


def standard_noise(shape: tuple[int, ...], *, seed: int, name: str) -> NDArray[np.float64]:
    """Bell-shaped noise of mean 0 and deviation 1, the same on every machine.

    numpy promises to keep the stream of a bit generator, not what its distributions make of it, and those
    call the C library's logarithm; sums of raw integers need neither.
    """
    stream = np.random.PCG64(np.random.SeedSequence([seed, crc32(name.encode())]))
    raw = np.asarray(stream.random_raw(math.prod(shape)), dtype="<u8")
    total = raw.view("<u2").reshape(-1, _TERMS).astype(np.int64).sum(axis=1)
    noise: NDArray[np.float64] = ((total - _MEAN) / _DEVIATION).reshape(shape)
    return noise


def _mean_and_spread(name: str, entry: Entry) -> tuple[float, float]:
    parent, leaf = name.split(".")[-2:] if "." in name else ("", name)
    if parent.endswith("norm") or leaf in ("q_weight", "k_weight"):
        return 1.0, 0.2
    if leaf.endswith("_scale") and leaf.startswith("hc_"):
        return 1.0, 0.3
    if leaf == "attn_sink" or leaf.endswith("_base"):
        return 0.0, 0.3
    if leaf in ("bias", "bias_vl"):
        return 0.0, 0.1
    if parent == "embed":
        return 0.0, 1.0
    fan_in = 1 / math.sqrt(entry.shape[-1])
    return 0.0, LOGIT_SPREAD * fan_in if name == "head.weight" else fan_in


def stored_headers(name: str, entry: Entry, encoding: Encoding) -> dict[str, Header]:
    """The arrays that ``stored_arrays`` yields, without their data."""
    if encoding == "released" and entry.quantisable:
        weight, scale = quantised_shapes(entry)
        dtype = "I8" if entry.kind is Kind.EXPERT else "F8_E4M3"
        return {name: Header(dtype, weight), scale_name(name): Header("F8_E8M0", scale)}
    exact = encoding == "fp32" or entry.kind is Kind.EXACT
    return {name: Header("F32" if exact else "BF16", entry.shape)}


_Quantise = Callable[[NDArray[np.float32]], tuple[NDArray[Any], NDArray[Any]]]
_QUANTISE: dict[Kind, _Quantise] = {
    Kind.DENSE: quantize_dense,
    Kind.ROWS: quantize_rows,
    Kind.EXPERT: quantize_mxfp4,
}


def stored_arrays(
    name: str, entry: Entry, encoding: Encoding, values: NDArray[np.float32]
) -> Iterator[tuple[str, NDArray[Any]]]:
    """One tensor as the file holds it: itself, followed by its scale when the encoding quantises it."""
    if encoding == "released" and entry.quantisable:
        weight, scale = _QUANTISE[entry.kind](values)
        yield name, weight
        yield scale_name(name), scale
    elif encoding == "fp32" or entry.kind is Kind.EXACT:
        yield name, values
    else:
        yield name, encode_bf16(values)
