"""What kernels read through pointers, field by field."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from vllm_deepinfer_plugins.kernels import Filter, Paged
from vllm_deepinfer_plugins.kernels.structures import filter_argument


def fields(structure: Any) -> dict[str, int]:
    return {name: getattr(structure, name) for name, _ in structure._fields_}


def test_a_paged_array_with_strides() -> None:
    memory, tables = torch.zeros(40, 24).bfloat16(), torch.zeros(3, 9, dtype=torch.int32)
    rows, table = memory[4:, :16], tables[1:, 2:7]
    found = fields(Paged(rows, table, 8, 5, 2).structure)
    assert found == {
        "rows": memory.data_ptr() + 4 * 24 * 2,
        "channels": 24,
        "table": tables.data_ptr() + (9 + 2) * 4,
        "table_stride": 9,
        "block_size": 8,
        "rows_per_block": 5,
        "ratio": 2,
    }


def test_a_paged_array_keeps_its_tensors_alive() -> None:
    paged = Paged(torch.full((64, 512), 7).bfloat16(), torch.zeros(1, 1, dtype=torch.int32), 4, 4, 1)
    others = [torch.zeros(64, 512).bfloat16() for _ in range(8)]
    first = ctypes.cast(paged.structure.rows, ctypes.POINTER(ctypes.c_uint16))[0]
    assert first == 0x40E0 and len(others) == 8


@pytest.mark.parametrize(
    ("rows", "table"),
    [
        (torch.zeros(4, 16), torch.zeros(1, 1, dtype=torch.int32)),
        (torch.zeros(4, 16).bfloat16(), torch.zeros(1, 1, dtype=torch.int64)),
        (torch.zeros(4, 16).bfloat16(), torch.zeros(3, 2, dtype=torch.int32).T),
        (torch.zeros(16, 4).bfloat16().T, torch.zeros(1, 1, dtype=torch.int32)),
    ],
)
def test_other_layouts_are_refused(rows: torch.Tensor, table: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        Paged(rows, table, 4, 4, 1)


@pytest.mark.parametrize("source", [True, False])
def test_candidate_blocks(source: bool) -> None:
    blocks = torch.zeros(5, 3, dtype=torch.int64)
    argument: Any = filter_argument(Filter(blocks, 8, source))
    assert fields(argument._obj) == {
        "blocks": blocks.data_ptr(),
        "count": 3,
        "size": 8,
        "source": int(source),
    }


def test_no_candidate_blocks() -> None:
    argument: Any = filter_argument(None)
    assert fields(argument._obj) == {"blocks": None, "count": 0, "size": 1, "source": 0}


@pytest.mark.parametrize("blocks", [torch.zeros(3, 5, dtype=torch.int64).T, torch.zeros(3, 5).int()])
def test_other_blocks_are_refused(blocks: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        filter_argument(Filter(blocks, 8, True))
