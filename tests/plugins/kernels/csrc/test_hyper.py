"""Hyper-connections against the plain module, with two, four and other numbers of streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_deepinfer_plugins.kernels import Kernels
from vllm_deepinfer_plugins.model.layers import RMSNorm
from vllm_deepinfer_plugins.model.mhc import HyperConnection, collapse

from ..samples import assert_near, noise
from ..variants import threads

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def module(n: int, hidden: int, iterations: int = 20) -> HyperConnection:
    config: Any = SimpleNamespace(
        hc_mult=n,
        hidden_size=hidden,
        hc_sinkhorn_iters=iterations,
        hc_eps=1e-6,
        rms_norm_eps=1e-20,
        initializer_range=0.05,
    )
    made = HyperConnection(config)
    made.fn.data = noise(n * (n + 2), n * hidden, seed=5, dtype=torch.float32) * (n * hidden) ** -0.5
    made.base.data = noise(n * (n + 2), seed=6, dtype=torch.float32)
    made.scale.data = torch.tensor([0.5, 1.5, -0.7])
    return made


def inputs(tokens: int, n: int, hidden: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return noise(tokens, n, hidden, seed=seed), noise(tokens, n, seed=seed + 1, dtype=torch.float32)


def enter(kernels: Kernels, mixing: HyperConnection, streams: torch.Tensor, last: torch.Tensor) -> Parts:
    norm = noise(streams.shape[2], seed=9)
    parts = (mixing.fn, mixing.base, mixing.scale)
    return kernels.enter(streams, last, parts, mixing.eps, mixing.iterations, norm, mixing.norm_eps)


SHAPES = [
    (1, 2, 32),
    (3, 4, 64),
    (4, 4, 100),
    (5, 1, 33),
    (15, 3, 48),
    (16, 4, 64),
    (17, 2, 7),
    (33, 8, 16),
    (6, 9, 20),
]


@pytest.mark.parametrize(("tokens", "n", "hidden"), SHAPES)
def test_a_sub_layer_is_entered(kernels: Kernels, tokens: int, n: int, hidden: int) -> None:
    mixing, (streams, last) = module(n, hidden), inputs(tokens, n, hidden)
    x, pre, post, comb = enter(kernels, mixing, streams, last)
    wanted = mixing(streams.float())
    for found, right in zip((pre, post, comb), wanted, strict=True):
        assert found.shape == right.shape and found.dtype == torch.float32
        torch.testing.assert_close(found, right, rtol=2e-4, atol=2e-6)
    mixed = (last.double().unsqueeze(-1) * streams.double()).sum(1)
    norm = RMSNorm(hidden, 1e-20, torch.float64)
    norm.weight.data = noise(hidden, seed=9).double()
    exact = mixed * mixed.square().mean(-1, keepdim=True).rsqrt() * norm.weight
    assert_near(x, exact, slack=float(exact.abs().max()) / 100)  # the collapse is rounded before the norm
    rounded = collapse(streams.float(), last).bfloat16().double()
    exact = rounded * rounded.square().mean(-1, keepdim=True).rsqrt() * norm.weight
    assert float(((x.double() - exact).abs() > exact.abs() / 128 + 1e-6).double().mean()) < 0.02


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_few_iterations(kernels: Kernels, iterations: int) -> None:
    mixing, (streams, last) = module(4, 32, iterations), inputs(5, 4, 32)
    comb = enter(kernels, mixing, streams, last)[3]
    torch.testing.assert_close(comb, mixing(streams.float())[2], rtol=1e-4, atol=1e-6)


def test_matrices_are_doubly_stochastic_even_with_large_logits(kernels: Kernels) -> None:
    mixing, (streams, last) = module(4, 64), inputs(40, 4, 64)
    mixing.scale.data *= 40
    pre, post, comb = enter(kernels, mixing, streams, last)[1:]
    torch.testing.assert_close(comb.sum(1), torch.ones(40, 4), atol=2e-5, rtol=0)
    assert ((pre > 0) & (pre < 1 + 1e-5)).all() and ((post >= 0) & (post <= 2)).all()


def test_silent_streams(kernels: Kernels) -> None:
    """All zero: eps alone keeps the norm finite, and the base decides the mix."""
    mixing = module(4, 32)
    x, pre, _, _ = enter(kernels, mixing, torch.zeros(3, 4, 32).bfloat16(), torch.ones(3, 4))
    assert not x.any()
    torch.testing.assert_close(pre, (mixing.base[:4].sigmoid() + 1e-6).expand(3, 4), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("tokens", "n", "hidden"), SHAPES)
def test_the_next_streams(kernels: Kernels, tokens: int, n: int, hidden: int) -> None:
    (streams, post), output = inputs(tokens, n, hidden), noise(tokens, hidden, seed=3)
    comb = noise(tokens, n, n, seed=4, dtype=torch.float32)
    wanted = post.double().unsqueeze(-1) * output.double().unsqueeze(1)
    wanted += torch.einsum("tij,tih->tjh", comb.double(), streams.double())
    assert_near(kernels.expand(output, streams, post, comb), wanted)
    strided = post.T.contiguous().T, comb.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(kernels.expand(output, streams, *strided), kernels.expand(output, streams, post, comb))


@pytest.mark.parametrize(("n", "hidden"), [(4, 96), (2, 50), (5, 24)])
def test_a_row_has_the_same_bits_in_any_company(kernels: Kernels, n: int, hidden: int) -> None:
    mixing, (streams, last), output = module(n, hidden), inputs(37, n, hidden), noise(37, hidden, seed=3)
    whole = enter(kernels, mixing, streams, last)
    after = kernels.expand(output, streams, *whole[2:])
    for rows in ([0], [36], [17, 4, 4, 30, 5], list(range(36, -1, -1))):
        some = enter(kernels, mixing, streams[rows], last[rows])
        assert all(torch.equal(part, right[rows]) for part, right in zip(some, whole, strict=True))
        assert torch.equal(kernels.expand(output[rows], streams[rows], *some[2:]), after[rows])
    with threads(2):
        again = enter(kernels, mixing, streams, last)
        assert all(torch.equal(part, right) for part, right in zip(again, whole, strict=True))
        assert torch.equal(kernels.expand(output, streams, *whole[2:]), after)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_poison_stays_in_its_row(kernels: Kernels, poison: float) -> None:
    mixing, (streams, last) = module(4, 32), inputs(20, 4, 32)
    clean = enter(kernels, mixing, streams, last)
    streams[6, 2, 3] = poison
    found = enter(kernels, mixing, streams, last)
    assert all(part[6].isnan().any() for part in found)
    others = [row for row in range(20) if row != 6]
    assert all(torch.equal(part[others], right[others]) for part, right in zip(found, clean, strict=True))


def test_no_tokens(kernels: Kernels) -> None:
    mixing, (streams, last) = module(4, 32), inputs(0, 4, 32)
    found = enter(kernels, mixing, streams, last)
    assert [part.shape for part in found] == [(0, 32), (0, 4), (0, 4), (0, 4, 4)]
    assert kernels.expand(noise(0, 32), streams, *found[2:]).shape == (0, 4, 32)
