"""Hyper-connections against explicit loops; Sinkhorn against what it is for."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_deepinfer_plugins.model.mhc import HyperConnection, collapse, expand, sinkhorn

from .samples import noise, text_config

N = 4


def by_hand(logits: list[list[float]], iterations: int, eps: float) -> list[list[float]]:
    """Softmax of the rows, then columns and rows by turns, in Python floats."""
    size = range(len(logits))
    matrix = []
    for row in logits:
        powers = [math.exp(value - max(row)) for value in row]
        matrix.append([power / sum(powers) + eps for power in powers])
    for step in range(2 * iterations - 1):
        if step % 2 == 0:
            sums = [sum(matrix[i][j] for i in size) + eps for j in size]
            matrix = [[matrix[i][j] / sums[j] for j in size] for i in size]
        else:
            matrix = [[value / (sum(row) + eps) for value in row] for row in matrix]
    return matrix


@given(
    logits=st.lists(st.lists(st.floats(-8, 8, width=32), min_size=3, max_size=3), min_size=3, max_size=3),
    iterations=st.integers(1, 6),
)
@settings(max_examples=40)
def test_sinkhorn_by_hand(logits: list[list[float]], iterations: int) -> None:
    found = sinkhorn(torch.tensor([logits]), iterations, 1e-6)[0].tolist()
    for row, wanted in zip(found, by_hand(logits, iterations, 1e-6), strict=True):
        assert row == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_rows_and_columns_sum_to_one() -> None:
    matrix = sinkhorn(noise(50, N, N), 20, 1e-6)
    assert float(matrix.min()) > 0
    torch.testing.assert_close(matrix.sum(1), torch.ones(50, N), atol=2e-5, rtol=0)
    torch.testing.assert_close(matrix.sum(2), torch.ones(50, N), atol=1e-3, rtol=0)


def test_a_permutation_stays_one() -> None:
    wanted = torch.eye(N)[[2, 0, 3, 1]]
    torch.testing.assert_close(sinkhorn(wanted.unsqueeze(0) * 60, 20, 1e-6)[0], wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_without_gradients_the_same_values(iterations: int) -> None:
    logits = noise(30, N, N) * 3
    untouched = logits.clone()
    wanted = sinkhorn(logits.requires_grad_(), iterations, 1e-6)
    with torch.no_grad():
        assert torch.equal(sinkhorn(logits, iterations, 1e-6), wanted)
    assert torch.equal(logits, untouched), "the faster form works in place, but not on its input"


def test_sinkhorn_has_gradients() -> None:
    logits = noise(2, 3, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, 3, 1e-6), logits)


def hyper_connection(seed: int = 0) -> HyperConnection:
    module = HyperConnection(text_config())
    module.fn.data, module.base.data = noise(24, 256, seed=seed) / 16, noise(24, seed=seed + 1)
    module.scale.data = torch.tensor([0.5, 1.5, -0.7])
    return module


def test_mixing_coefficients_one_token_at_a_time() -> None:
    module, streams = hyper_connection(), noise(5, N, 64, seed=3)
    pre, post, comb = module(streams)
    assert (pre.shape, post.shape, comb.shape) == ((5, N), (5, N), (5, N, N))
    near = {"rtol": 1e-6, "atol": 1e-6}  # sums of 256 float32 in a machine's own order
    for token in range(5):
        flat = streams[token].flatten().double()
        normal = flat / (flat.square().mean() + 1e-20).sqrt()
        raw = module.fn.double() @ normal
        a, b, c = module.scale.tolist()
        base = module.base.double()
        torch.testing.assert_close(pre[token].double(), (a * raw[:4] + base[:4]).sigmoid() + 1e-6, **near)
        torch.testing.assert_close(post[token].double(), 2 * (b * raw[4:8] + base[4:8]).sigmoid(), **near)
        wanted = by_hand((c * raw[8:] + base[8:]).unflatten(0, (N, N)).tolist(), 20, 1e-6)
        torch.testing.assert_close(comb[token].double(), torch.tensor(wanted).double(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_coefficients_are_float32_and_ignore_the_streams_size(dtype: torch.dtype) -> None:
    module, streams = hyper_connection(), noise(3, N, 64, dtype=dtype)
    small, large = module(streams), module(streams * 1024)
    for one, other in zip(small, large, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_collapse_and_expand_loop_by_loop(dtype: torch.dtype) -> None:
    streams, output = noise(6, N, 32, seed=1, dtype=dtype), noise(6, 32, seed=2, dtype=dtype)
    pre, post, comb = noise(6, N, seed=3), noise(6, N, seed=4), noise(6, N, N, seed=5)
    collapsed, expanded = collapse(streams, pre), expand(output, streams, post, comb)
    assert (collapsed.dtype, expanded.dtype) == (dtype, dtype)
    assert (collapsed.shape, expanded.shape) == ((6, 32), (6, N, 32))
    tolerance = {"rtol": 2**-7, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    wide, out = streams.double(), output.double()
    for token in range(6):
        wanted = sum(pre[token, n].double() * wide[token, n] for n in range(N))
        torch.testing.assert_close(collapsed[token].double(), wanted, **tolerance)
        for to in range(N):
            wanted = post[token, to].double() * out[token]
            for source in range(N):
                wanted = wanted + comb[token, source, to].double() * wide[token, source]
            torch.testing.assert_close(expanded[token, to].double(), wanted, **tolerance)


def test_identity_mix_is_a_plain_residual() -> None:
    """comb = 1 and post = 1 add the output to each stream; pre = stream 0 reads that stream."""
    streams, output = noise(3, N, 8), noise(3, 8, seed=1)
    one = torch.eye(N).expand(3, N, N)
    torch.testing.assert_close(expand(output, streams, torch.ones(3, N), one), streams + output.unsqueeze(1))
    first = torch.zeros(3, N)
    first[:, 0] = 1
    assert torch.equal(collapse(streams, first), streams[:, 0])


def test_gradients_reach_every_parameter() -> None:
    module, streams = hyper_connection(), noise(3, N, 64).requires_grad_()
    pre, post, comb = module(streams)
    next_streams = expand(collapse(streams, pre), streams, post, comb)
    next_streams.square().sum().backward()
    for name, parameter in [*module.named_parameters(), ("streams", streams)]:
        assert parameter.grad is not None and float(parameter.grad.abs().sum()) > 0, name
    assert [name for name, _ in module.named_buffers()] == ["_part"]
    assert "_part" not in module.state_dict(), "no checkpoint has it"
