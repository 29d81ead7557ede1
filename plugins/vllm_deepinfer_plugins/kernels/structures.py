"""What the attention kernels read through pointers: paged arrays and candidate blocks."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch


class _Paged(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_void_p),
        ("channels", ctypes.c_int64),
        ("table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("rows_per_block", ctypes.c_int64),
        ("ratio", ctypes.c_int64),
    ]


class _Candidates(ctypes.Structure):
    _fields_ = [
        ("blocks", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("source", ctypes.c_int64),
    ]


class Paged:
    """A paged array of bfloat16 rows [rows, channels] with a step's block table [requests, blocks] int32.

    Args:
        rows_per_block: Stride of a block in rows.
        ratio: Tokens per row.
    """

    def __init__(
        self, rows: torch.Tensor, table: torch.Tensor, block_size: int, rows_per_block: int, ratio: int
    ) -> None:
        assert rows.dtype == torch.bfloat16 and rows.stride(1) == 1
        assert table.dtype == torch.int32 and table.stride(1) == 1
        self._kept = (rows, table)
        self.structure = _Paged(
            rows.data_ptr(),
            rows.stride(0),
            table.data_ptr(),
            table.stride(0),
            block_size,
            rows_per_block,
            ratio,
        )


class Filter(NamedTuple):
    """The two-level indexer's candidate blocks of a step, [tokens, count] int64.

    ``source`` says whether the layer fills them or keeps inside them; ``size`` is the entries of a block.
    """

    blocks: torch.Tensor
    size: int
    source: bool


def filter_argument(candidates: Filter | None) -> object:
    """The candidate blocks as an argument; None means that every entry may be chosen."""
    if candidates is None:
        return ctypes.byref(_Candidates(None, 0, 1, 0))
    blocks = candidates.blocks
    assert blocks.is_contiguous() and blocks.dtype == torch.int64
    return ctypes.byref(_Candidates(blocks.data_ptr(), blocks.shape[1], candidates.size, candidates.source))
