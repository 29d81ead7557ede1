"""Inputs of the kernels, and how near a result has to be."""

from __future__ import annotations

import torch
from vllm_deepinfer_plugins.kernels import Paged

ULP = 2**-8
"""Largest relative error of rounding to bfloat16."""


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Standard normal values that depend on shape and seed alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(*shape: int, most: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Whole numbers from −most to most: their products and sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).to(dtype)


def assert_near(found: torch.Tensor, wanted: torch.Tensor, slack: float = 1e-5) -> None:
    """One rounding to bfloat16 (of a bfloat16 result) away from the exact value, and ``slack`` absolutely."""
    assert found.shape == wanted.shape and wanted.dtype == torch.float64
    relative = ULP * 1.01 if found.dtype == torch.bfloat16 else 1e-5
    error = (found.double() - wanted).abs() - relative * wanted.abs() - slack
    assert not error.isnan().any() and float(error.max()) <= 0, f"{float(error.max())} too far"


def paged(
    sequences: list[torch.Tensor], *, block: int = 4, ratio: int = 1, gap: int = 1, seed: int = 0
) -> Paged:
    """Rows of requests in blocks of ``block`` tokens, handed out in random order; all else is NaN.

    Args:
        sequences: Of each request [rows, channels], a row per ``ratio`` tokens.
        gap: Rows between blocks, and channels between rows, that are somebody else's.
    """
    per_block, stride = block // ratio, block // ratio + gap
    counts = [-(-len(rows) // per_block) for rows in sequences]
    numbers = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
    channels = sequences[0].shape[1]
    memory = torch.full(((sum(counts) + 2) * stride, channels + 8 * gap), torch.nan, dtype=torch.bfloat16)
    rows = memory[:, :channels]
    table = torch.full((len(sequences), max(counts) + 1), 10**6, dtype=torch.int32)
    for request, sequence in enumerate(sequences):
        for at, part in enumerate(sequence.split(per_block)):
            table[request, at] = number = numbers.pop()
            rows[number * stride :][: len(part)] = part
    return Paged(rows, table, block, stride, ratio)
