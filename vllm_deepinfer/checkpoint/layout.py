"""The released layout as files hold it: names, stored shapes and data types per encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .config import TextConfig, V41Config
from .tensors import FLOATS, Entry, Kind, entries, quantised_shapes, scale_name
from .verify import verify_headers

__all__ = ["ENCODINGS", "Encoding", "TensorSpec", "expected_tensors", "stored", "verify_headers"]

Encoding = Literal["released", "bf16", "fp32"]
ENCODINGS: tuple[Encoding, ...] = ("released", "bf16", "fp32")


@dataclass(frozen=True)
class TensorSpec:
    """One tensor as a file holds it.

    Attributes:
        shape: Shape of the stored array; packed experts have half the columns.
        dtypes: Legal safetensors data types.
        optional: The checkpoint may leave it out.
    """

    shape: tuple[int, ...]
    dtypes: frozenset[str]
    optional: bool = False


def expected_tensors(config: V41Config | TextConfig, *, encoding: Encoding) -> dict[str, TensorSpec]:
    """The released layout of a config: embed, layers.N.*, norm, head, mtp.M.*, with ``.scale`` beside
    quantised weights.

    ``released`` names the one stored form of the release; ``bf16`` and ``fp32`` are the unquantised forms, in
    which any floating type is legal for any tensor.
    """
    specs: dict[str, TensorSpec] = {}
    for name, entry in entries(config):
        specs |= stored(name, entry, encoding)
    return specs


def stored(name: str, entry: Entry, encoding: Encoding) -> dict[str, TensorSpec]:
    """The arrays that hold one entry: itself, and its scale when the encoding quantises it."""
    if encoding == "released" and entry.quantisable:
        weight, scale = quantised_shapes(entry)
        dtype = "I8" if entry.kind is Kind.EXPERT else "F8_E4M3"
        return {
            name: TensorSpec(weight, frozenset({dtype}), entry.optional),
            scale_name(name): TensorSpec(scale, frozenset({"F8_E8M0"}), entry.optional),
        }
    return {name: TensorSpec(entry.shape, FLOATS, entry.optional)}
