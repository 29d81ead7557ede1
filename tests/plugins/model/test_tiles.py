"""Row tiles, and what batch-invariant mode asks of this machine's libraries.

A row's bits may depend neither on its place in a tile nor on the rows beside it. No library promises that, so
it is asked here, of every kind of operation in the model's row functions and of those functions themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from vllm_deepinfer_plugins.model.attention import dense_attention, sink_attention
from vllm_deepinfer_plugins.model.indexer import index_scores
from vllm_deepinfer_plugins.model.layers import GroupedLinear, RMSNorm
from vllm_deepinfer_plugins.model.mhc import HyperConnection, collapse, expand
from vllm_deepinfer_plugins.model.moe import Router, SharedExpert
from vllm_deepinfer_plugins.model.quant import quantize_cache
from vllm_deepinfer_plugins.model.rope import Rotary, rotate
from vllm_deepinfer_plugins.model.tiles import ROWS, RowTiles

from .samples import noise, text_config

DTYPES = [torch.float32, torch.bfloat16]
TOTAL = 3 * ROWS + 5


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread, or as many as a test's `threads` parameter says."""
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request, "param", 1))
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


two_threads = pytest.mark.parametrize("threads", [1, 2], ids=["1 thread", "2 threads"], indirect=True)


def bits(values: torch.Tensor) -> torch.Tensor:
    """The raw bits, so that equal means equal."""
    return values.contiguous().view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)


def assert_invariant(function: Callable[..., Any], *inputs: torch.Tensor, infinite: bool = True) -> None:
    """Every row has the same bits at other places, in other company, and alone."""
    tiles, generator = RowTiles(ROWS), torch.Generator().manual_seed(5)

    def results(*inputs: torch.Tensor) -> list[torch.Tensor]:
        found = tiles(function, *inputs)
        return [bits(value) for value in (found if isinstance(found, tuple) else (found,))]

    wanted = results(*inputs)
    orders = [torch.randperm(TOTAL, generator=generator) for _ in range(2)]
    for order in [*orders, torch.tensor([0]), torch.tensor([TOTAL - 1])]:
        for ours, reference in zip(results(*(value[order] for value in inputs)), wanted, strict=True):
            assert torch.equal(ours, reference[order])
    others = [value.clone() for value in inputs]
    for value in others:
        if value.is_floating_point():
            value[1::2] *= 1000
            if infinite:
                value[3] = torch.inf
    for ours, reference in zip(results(*others), wanted, strict=True):
        assert torch.equal(ours[::2], reference[::2])


def rows(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return noise(TOTAL, *shape, seed=seed, dtype=dtype)


@two_threads
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(1, 1), (3, 7), (16, 16), (33, 17), (64, 127), (129, 31), (256, 512), (512, 96), (1023, 5)],
)
def test_linear(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    weight = noise(outputs, inputs, seed=1, dtype=dtype)
    # oneDNN's bfloat16 product reads one element past a row of odd length and multiplies it by zero: a finite
    # neighbour does not matter, an infinite one makes a NaN. V4.1 has no odd sizes.
    even = dtype == torch.float32 or inputs % 2 == 0
    if inputs == 1023 and not torch.cpu._is_avx512_supported():
        pytest.skip("MKL's product for AVX2 sums a long odd row in an order of its own.")
    assert_invariant(lambda x: F.linear(x, weight), rows(inputs, dtype=dtype), infinite=even)


@two_threads
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("left", "inner", "right"),
    [(1, 1, 1), (4, 32, 33), (3, 7, 5), (8, 64, 129), (5, 31, 256), (2, 129, 3)],
)
def test_bmm(left: int, inner: int, right: int, dtype: torch.dtype) -> None:
    assert_invariant(torch.bmm, rows(left, inner, dtype=dtype), rows(inner, right, dtype=dtype, seed=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 5, 16, 17, 100, 257])
@pytest.mark.parametrize(
    "function",
    [
        torch.sigmoid,
        F.silu,
        F.softplus,
        lambda x: torch.rsqrt(x.abs() + 1e-20),
        lambda x: F.softplus(x.float()).sqrt(),
        lambda x: x.softmax(dim=-1),
        lambda x: x.square().mean(dim=-1, keepdim=True),
        lambda x: x.float().sum(dim=-1),
        lambda x: x.exp() / (x.abs() + 1),
    ],
    ids=["sigmoid", "silu", "softplus", "rsqrt", "router", "softmax", "mean", "sum", "divide"],
)
def test_elementwise_and_sums(function: Callable[..., Any], size: int, dtype: torch.dtype) -> None:
    assert_invariant(function, rows(size, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [1, 16, 33, 130])
def test_attention_and_index_scores(slots: int, dtype: torch.dtype) -> None:
    queries, keys = rows(4, 32, dtype=dtype), rows(slots, 32, dtype=dtype, seed=1)
    seen, sink = torch.rand(TOTAL, slots, generator=torch.Generator().manual_seed(3)) < 0.7, noise(4, seed=4)
    weights = rows(4, dtype=dtype, seed=2)
    assert_invariant(lambda q, k, s: sink_attention(q, k, s, sink), queries, keys, seen)
    assert_invariant(index_scores, queries, weights, keys)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_models_functions_of_rows(dtype: torch.dtype) -> None:
    config, x, streams = text_config(), rows(64, dtype=dtype), rows(4, 64, dtype=dtype, seed=1)
    torch.manual_seed(0)
    hyper = HyperConnection(config)
    assert_invariant(hyper, streams)
    pre, post, comb = hyper(streams)
    assert_invariant(collapse, streams, pre)
    assert_invariant(expand, x, streams, post, comb)
    assert_invariant(RMSNorm(64, 1e-20, dtype), x)
    assert_invariant(GroupedLinear(32, 24, 2, dtype), x)
    assert_invariant(SharedExpert(config, dtype), x)
    router = Router(config, 8, 2)
    assert_invariant(lambda x: router(x, None), x)
    assert_invariant(lambda x: quantize_cache(x, "nvfp4"), x)
    positions = torch.randint(0, 100_000, (TOTAL,), generator=torch.Generator().manual_seed(6))
    rotary = Rotary(config, compressed=True)
    assert_invariant(lambda p: torch.view_as_real(rotary(p)), positions)
    assert_invariant(lambda x, p: rotate(x, rotary(p)), x, positions)


# The mechanism


@pytest.mark.parametrize("total", [1, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS + 7])
@pytest.mark.parametrize("tile", [None, 1, 4, ROWS])
def test_equals_one_call_over_all_rows(total: int, tile: int | None) -> None:
    x, y, weight = noise(total, 6), noise(total, 2, 3, seed=1), noise(5, 6, seed=2)

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.linear(x, weight), y.transpose(1, 2) + 1

    product, moved = RowTiles(tile)(function, x, y)
    torch.testing.assert_close(product, x @ weight.T)
    assert torch.equal(moved, y.transpose(1, 2) + 1)


def test_every_call_has_one_shape_and_zero_rows_fill_it() -> None:
    calls = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.clone())
        return x * 2

    x = noise(10, 3)
    assert torch.equal(RowTiles(4)(function, x), x * 2)
    assert [call.shape for call in calls] == [(4, 3)] * 3
    assert torch.equal(torch.cat(calls)[:10], x)
    assert calls[-1][2:].tolist() == [[0, 0, 0]] * 2
    assert all(call.is_contiguous() for call in calls)


def test_views_come_in_contiguous() -> None:
    strides = []

    def function(x: torch.Tensor) -> torch.Tensor:
        strides.append(x.stride())
        return x

    RowTiles(4)(function, noise(8, 12)[:, 3:7])
    assert strides == [(4, 1), (4, 1)]


def test_without_inputs_and_outputs() -> None:
    x = noise(6, 2)

    def function(
        nothing: None, x: torch.Tensor, flag: torch.Tensor
    ) -> tuple[torch.Tensor, None, torch.Tensor]:
        assert nothing is None
        return x + 1, None, ~flag

    flag = torch.tensor([True, False, True, False, False, True])
    added, none, inverted = RowTiles(4)(function, None, x, flag)
    assert torch.equal(added, x + 1) and none is None
    assert torch.equal(inverted, ~flag) and inverted.dtype == torch.bool


def test_dense_attention_is_no_function_of_rows() -> None:
    """Its keys are shared, so batch-invariant mode cannot use it; the gathered form has the same values."""
    keys, sink = noise(20, 32, seed=1), noise(4, seed=2)
    queries = noise(TOTAL, 4, 32)
    seen = torch.ones(TOTAL, 20, dtype=torch.bool)
    gathered = RowTiles(ROWS)(
        lambda q, k, s: sink_attention(q, k, s, sink), queries, keys.expand(TOTAL, -1, -1), seen
    )
    torch.testing.assert_close(gathered, dense_attention(queries, keys, seen, sink))
