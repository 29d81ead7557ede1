"""A released model's sizes on threads of their own: what lies on the stack has to fit there."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from vllm_deepinfer_plugins.kernels import Kernels

from .csrc.test_decode import Rows
from .csrc.test_hyper import enter, inputs, module
from .csrc.test_prefill import Chunk, assert_close
from .csrc.test_rows import router, turns
from .csrc.test_select import SIZE, Step, best
from .samples import assert_near, noise
from .variants import threads

HIDDEN, EXPERTS, HEADS, HEAD = 7168, 384, 128, 512


def on_a_small_stack(function: Callable[[], None]) -> None:
    """Run on a thread with a stack of 1 MiB, an eighth of the usual one."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with torch.no_grad(), threads(2):
                function()
        except BaseException as error:
            failures.append(error)

    before = threading.stack_size(1 << 20)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    if failures:
        raise failures[0]


def test_hyper_connections(kernels: Kernels) -> None:
    mixing, (streams, last) = module(4, HIDDEN), inputs(18, 4, HIDDEN)

    def check() -> None:
        _, pre, post, comb = enter(kernels, mixing, streams, last)
        for found, wanted in zip((pre, post, comb), mixing(streams.float()), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
        output = kernels.expand(noise(18, HIDDEN, seed=3), streams, post, comb)
        wanted = post.double().unsqueeze(-1) * noise(18, HIDDEN, seed=3).double().unsqueeze(1)
        assert_near(output, wanted + torch.einsum("tij,tih->tjh", comb.double(), streams.double()))

    on_a_small_stack(check)


def test_router_and_rows(kernels: Kernels) -> None:
    of, x = router(HIDDEN, EXPERTS, 8), noise(3, HIDDEN)

    def check() -> None:
        ids, weights = kernels.route(x, of.weight, of.bias, 8, of.scale, True)
        wanted_ids, wanted = of(x.float(), None)
        assert torch.equal(ids, wanted_ids)
        torch.testing.assert_close(weights, wanted, rtol=1e-4, atol=1e-6)
        heads = noise(3, HEADS, HEAD)
        turned = kernels.rows(heads, turns=turns(3, 32))
        assert_near(kernels.rows(turned, turns=turns(3, 32), inverse=True), heads.double(), slack=0.04)
        norm = kernels.rows(x, norm=torch.ones(HIDDEN).bfloat16(), eps=1e-20)
        assert_near(norm, x.double() * x.double().square().mean(1, keepdim=True).rsqrt())

    on_a_small_stack(check)


def test_attention(kernels: Kernels) -> None:
    rows, chunk = Rows([(2, 74), (0, 39)], HEADS, HEAD, 2, 37), Chunk(3, 70, HEADS, HEAD, 2, 37)

    def check() -> None:
        found = rows.call(kernels, 128)
        for row in range(2):
            assert_near(found[row : row + 1], rows.by_hand(row, 128), slack=2e-5)
        assert_close(chunk.call(kernels, 128), chunk.by_hand(128))

    on_a_small_stack(check)


@pytest.mark.parametrize("heads", [32, 64])
def test_selection(kernels: Kernels, heads: int) -> None:
    """Index heads of 128 channels."""
    step = Step(3, heads, 900, 1)
    step.query, step.keys = step.query.repeat(1, 1, 128 // SIZE), step.keys.repeat(1, 128 // SIZE)

    def check() -> None:
        wanted = best(step.scores(), 512)
        assert torch.equal(step.rows(kernels, 512), wanted)
        assert torch.equal(step.span(kernels, 512), wanted)

    on_a_small_stack(check)
