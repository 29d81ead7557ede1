"""Blocked attention against the plain one, forwards and backwards."""

from __future__ import annotations

import pytest
import torch
from vllm_deepinfer_plugins.model.attention import dense_attention
from vllm_deepinfer_plugins.train.attention import attend, window_seen

BATCH, LENGTH, HEADS, SIZE, WINDOW, WIDTH = 2, 48, 3, 8, 16, 24


def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((BATCH, LENGTH, HEADS, SIZE), (BATCH, LENGTH, SIZE), (BATCH, WIDTH, SIZE), (HEADS,))
    return tuple(torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes)


def plain(query: torch.Tensor, window: torch.Tensor, entries: torch.Tensor, sink, seen):  # type: ignore[no-untyped-def]
    back = torch.arange(LENGTH).unsqueeze(1) - torch.arange(LENGTH)
    near = (back >= 0) & (back < WINDOW)
    return torch.stack(
        [
            dense_attention(q, torch.cat((w, e)), torch.cat((near, s), dim=1), sink)
            for q, w, e, s in zip(query, window, entries, seen, strict=True)
        ]
    )


def test_what_a_chunk_sees_is_the_window() -> None:
    seen = window_seen(LENGTH, WINDOW, torch.device("cpu"))
    whole = torch.zeros(LENGTH, LENGTH + WINDOW, dtype=torch.bool)
    for chunk, part in enumerate(seen[:, :, 0]):
        rows, keys = slice(chunk * WINDOW, (chunk + 1) * WINDOW), slice(chunk * WINDOW, (chunk + 2) * WINDOW)
        whole[rows, keys] = part
    back = torch.arange(LENGTH).unsqueeze(1) - torch.arange(LENGTH)
    assert torch.equal(whole[:, WINDOW:], (back >= 0) & (back < WINDOW))
    assert not whole[:, :WINDOW].any()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_values_and_gradients(share: float) -> None:
    query, window, entries, sink = inputs()
    seen = torch.rand(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)) < share
    near = window_seen(LENGTH, WINDOW, query.device)
    ours, total = attend(query, window, near, entries, seen, sink)
    expected = plain(query, window, entries, sink, seen)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2))
    for a, b in zip(
        torch.autograd.grad(ours, (query, window, entries, sink), upstream),
        torch.autograd.grad(expected, (query, window, entries, sink), upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    assert not total.requires_grad and bool((total > sink).all()), "the sink is one of the terms"


def test_the_window_alone() -> None:
    query, window, entries, sink = inputs()
    near = window_seen(LENGTH, WINDOW, query.device)
    ours, total = attend(query, window, near, None, None, sink)
    none = torch.zeros(BATCH, LENGTH, WIDTH, dtype=torch.bool)
    with_nothing, same = attend(query, window, near, entries, none, sink)
    torch.testing.assert_close(ours, with_nothing)
    torch.testing.assert_close(total, same)
    gradients = torch.autograd.grad(ours.sum(), (query, window, sink))
    expected = torch.autograd.grad(with_nothing.sum(), (query, window, sink))
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b)
