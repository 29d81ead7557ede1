"""The safetensors container: headers read without their data, files written tensor by tensor.

The library's numpy front end has no bfloat16 and no FP8, and its raw interface changed with version 0.8; the
format itself (a length, a JSON header, the data) has not changed since it was published:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import CheckpointError

_SIZES = {
    1: ("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"),
    2: ("F16", "BF16", "I16", "U16"),
    4: ("F32", "I32", "U32"),
    8: ("F64", "I64", "U64"),
}
BYTES_PER_ELEMENT = {dtype: size for size, dtypes in _SIZES.items() for dtype in dtypes}
_MAX_HEADER = 100_000_000  # the format's own limit, in bytes


@dataclass(frozen=True)
class Header:
    """One tensor as a file's header describes it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Length of the tensor's data."""
        return math.prod(self.shape) * BYTES_PER_ELEMENT[self.dtype]


def read_headers(file: Path) -> dict[str, Header]:
    """Read what a safetensors file holds, and check that all of its data is there.

    Raises:
        CheckpointError: The file is missing, cut off, or no safetensors file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= length <= _MAX_HEADER:
                raise CheckpointError(f"{file} is no safetensors file: download it again")
            if size < 8 + length:
                raise CheckpointError(f"{file} is cut off inside its header: download it again")
            entries = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}): download it again") from None
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} has a damaged header ({error}): download it again") from None
    headers, end = _parse(file, entries)
    if size != 8 + length + end:
        raise CheckpointError(
            f"{file} has {size} bytes, but its header describes {8 + length + end}: download it again"
        )
    return headers


def _parse(file: Path, entries: Any) -> tuple[dict[str, Header], int]:
    headers: dict[str, Header] = {}
    spans: list[tuple[int, int]] = []
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file} has a damaged header (no JSON object): download it again")
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        try:
            header = Header(entry["dtype"], tuple(entry["shape"]))
            start, end = entry["data_offsets"]
            whole = all(type(number) is int and number >= 0 for number in (*header.shape, start, end))
            whole = whole and header.nbytes == end - start
        except (KeyError, TypeError, ValueError):
            whole = False
        if not whole:
            raise CheckpointError(f"{file} has a damaged header (entry {name}): download it again")
        headers[name] = header
        spans.append((start, end))
    position = 0
    for start, end in sorted(spans):
        if start != position:
            raise CheckpointError(f"{file} has a damaged header (a gap at {position}): download it again")
        position = end
    return headers, position


def write_file(file: Path, headers: Mapping[str, Header], tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write one safetensors file; ``tensors`` yields each array, little-endian, in the order of ``headers``.

    Raises:
        ValueError: An array is not the one that the header announces.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, header in headers.items():
        span = [position, position + header.nbytes]
        entries[name] = {"dtype": header.dtype, "shape": list(header.shape), "data_offsets": span}
        position = span[1]
    encoded = json.dumps(entries, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    remaining = list(headers.items())[::-1]
    with file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, array in tensors:
            announced, header = remaining.pop() if remaining else ("", Header("U8", ()))
            if (announced, header.shape, header.nbytes) != (name, array.shape, array.nbytes):
                raise ValueError(f"{name} is not the tensor that the header announces")
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            stream.write(np.ascontiguousarray(little).tobytes())
    if remaining:
        raise ValueError(f"{remaining[-1][0]} was announced and not written")
