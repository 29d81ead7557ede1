"""Row tiles: how a row's bits come to depend on that row alone.

BLAS picks a kernel by the shape of a product, and PyTorch's elementwise loops treat the last few elements of
a tensor with other code than the rest, so the same token gives other bits in a batch of 3 than in a batch of
300. In a tile of a fixed number of rows all shapes are always the same; what is left is the row's place in
the tile, on which float32 and bfloat16 products of MKL and oneDNN were seen not to depend
(tests/plugins/model/test_tiles.py asks them again on every machine). Zero rows fill the last tile up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ROWS = 32
"""Rows of a tile: with 32 even an odd channel count leaves no vector loop a remainder."""


class RowTiles:
    """Runs a function of rows, whole or in tiles.

    Args:
        rows: Rows per tile; None runs the function once over all rows, which is faster and not invariant.
    """

    def __init__(self, rows: int | None = None) -> None:
        self.rows = rows

    def __call__(self, function: Callable[..., Any], *inputs: torch.Tensor | None) -> Any:
        """Apply ``function`` to tensors that share their first axis.

        Args:
            function: Takes what ``inputs`` holds and returns one tensor, or a tuple of tensors and Nones,
                whose first axis is the inputs' first axis. Row i of a result may depend on row i of the
                inputs only.
            inputs: Tensors [rows, ...], or None.

        Returns:
            What one call over all rows would return.
        """
        if self.rows is None:
            return function(*inputs)
        total = next(len(value) for value in inputs if value is not None)
        parts = [
            function(*(_tile(value, start, self.rows) for value in inputs))
            for start in range(0, total, self.rows)
        ]
        if isinstance(parts[0], torch.Tensor):
            return _join(parts, total)
        return tuple(
            None if column[0] is None else _join(column, total) for column in zip(*parts, strict=True)
        )


def _tile(values: torch.Tensor | None, start: int, rows: int) -> torch.Tensor | None:
    if values is None:
        return None
    part = values[start : start + rows]
    if len(part) == rows:
        return part.contiguous()
    full = values.new_zeros(rows, *values.shape[1:])
    full[: len(part)] = part
    return full


def _join(parts: Any, total: int) -> torch.Tensor:
    return parts[0][:total] if len(parts) == 1 else torch.cat(tuple(parts))[:total]
