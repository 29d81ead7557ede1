"""What the attention functions refuse, and what they do without memory."""

from __future__ import annotations

import pytest
import torch
from vllm_deepinfer_plugins.kernels import Kernels

from .samples import noise, paged

FAR = 2**46
"""A position whose scores no address space holds."""


def one(value: int) -> torch.Tensor:
    return torch.tensor([value])


def test_rows_without_memory(kernels: Kernels) -> None:
    keys, query, sink = paged([noise(3, 32)]), noise(1, 2, 32), torch.zeros(2)
    with pytest.raises(MemoryError, match="lower max_num_batched_tokens or max_model_len"):
        kernels.attend_rows(query, one(2), one(0), keys, FAR, None, None, sink)
    with pytest.raises(MemoryError):
        kernels.select_rows(query, torch.ones(1, 2), one(0), one(FAR), keys, 0, None, 2)
    assert kernels.attend_rows(query, one(2), one(0), keys, 3, None, None, sink).isfinite().all()


def test_spans_without_memory(kernels: Kernels) -> None:
    keys, query, sink = paged([noise(3, 32)]), noise(1, 2, 32), torch.zeros(2)
    with pytest.raises(MemoryError):
        kernels.attend_span(query, FAR, 0, keys, FAR, None, None, sink)
    with pytest.raises(MemoryError):
        kernels.select_span(query, torch.ones(1, 2), FAR, 0, keys, 0, None, 2)
    assert kernels.attend_span(query, 2, 0, keys, 3, None, None, sink).isfinite().all()


def test_strided_indices_are_refused(kernels: Kernels) -> None:
    keys, query, sink = paged([noise(3, 32)]), noise(2, 2, 32), torch.zeros(2)
    strided, plain = torch.zeros(2, 2, dtype=torch.int64)[:, 0], torch.zeros(2, dtype=torch.int64)
    for positions, requests in ((strided, plain), (plain, strided)):
        with pytest.raises(AssertionError):
            kernels.attend_rows(query, positions, requests, keys, 2, None, None, sink)
        with pytest.raises(AssertionError):
            kernels.select_rows(query, torch.ones(2, 2), positions, requests, keys, 0, None, 2)


def test_strided_queries_and_choices_are_taken(kernels: Kernels) -> None:
    """Rows of wider arrays, as slices of projections are."""
    keys, wide, sink = paged([noise(9, 32)]), noise(3, 2, 64), torch.zeros(2)
    chosen = torch.tensor([[0, 9, 1], [1, 9, -1], [2, 9, 0]])[:, ::2]
    positions, requests = torch.tensor([2, 3, 4]), torch.zeros(3, dtype=torch.int64)
    weights = noise(3, 4, dtype=torch.float32)[:, ::2]
    query = wide[..., 16:48]
    for reach in (1, 4):
        found = kernels.attend_rows(query, positions, requests, keys, reach, keys, chosen, sink)
        copy = query.contiguous(), positions, requests, keys, reach, keys, chosen.contiguous(), sink
        assert torch.equal(found, kernels.attend_rows(*copy))
        span = kernels.attend_span(query, 2, 0, keys, reach, keys, chosen, sink)
        assert torch.equal(span, kernels.attend_span(copy[0], 2, 0, keys, reach, keys, copy[6], sink))
        torch.testing.assert_close(span.float(), found.float(), rtol=0.02, atol=0.02)
    rows = kernels.select_rows(query, weights, requests, positions + 1, keys, 0, None, 2)
    assert torch.equal(rows, kernels.select_span(query, weights.contiguous(), 2, 0, keys, 0, None, 2))
