"""Attention of a prompt chunk against dense attention in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_deepinfer_plugins.kernels import Kernels
from vllm_deepinfer_plugins.model.attention import dense_attention
from vllm_deepinfer_plugins.model.selection import selection_mask

from ..samples import noise, paged
from ..variants import threads


class Chunk:
    """``tokens`` rows from position ``begin`` of the second of two requests."""

    def __init__(
        self, tokens: int, begin: int, heads: int, size: int, ratio: int, k: int, seed: int = 0
    ) -> None:
        self.begin, self.tokens, self.size, self.ratio = begin, tokens, size, ratio
        end = begin + tokens
        self.keys, self.latents = (
            noise(end, size, seed=seed),
            noise(max(end // ratio, 1), size + 32, seed=seed + 1),
        )
        self.window = paged([noise(5, size), self.keys])
        self.entries = paged([noise(2, size + 32), self.latents], block=4 * ratio, ratio=ratio)
        self.query, self.sink = noise(tokens, heads, size, seed=seed + 2), noise(heads, seed=seed + 3).float()
        order = torch.rand(tokens, end // ratio, generator=torch.Generator().manual_seed(seed)).argsort(1)
        order = torch.nn.functional.pad(order, (0, k), value=2**40)[:, :k]
        visible = (torch.arange(begin, end) + 1) // ratio
        self.chosen = torch.where(order < visible.unsqueeze(1), order, -1)

    def call(self, kernels: Kernels, reach: int, *, entries: bool = True) -> torch.Tensor:
        return kernels.attend_span(
            self.query,
            self.begin,
            1,
            self.window,
            reach,
            self.entries if entries else None,
            self.chosen if entries else None,
            self.sink,
        )

    def by_hand(self, reach: int, *, entries: bool = True) -> torch.Tensor:
        positions = torch.arange(self.begin, self.begin + self.tokens).unsqueeze(1)
        back = positions - torch.arange(len(self.keys))
        seen, keys = (back >= 0) & (back < reach), self.keys
        if entries:
            keys = torch.cat((keys, self.latents[:, : self.size]))
            seen = torch.cat((seen, selection_mask(self.chosen, len(self.latents))), dim=1)
        logits = torch.einsum("thd,kd->htk", self.query.double(), keys.double()) * self.size**-0.5
        powers = logits.exp() * seen
        weights = powers / (powers.sum(2, keepdim=True) + self.sink.double().exp().view(-1, 1, 1))
        return torch.einsum("htk,kd->thd", weights, keys.double())


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Weights are rounded to bfloat16 here: 2^-8 of values of about 4."""
    assert found.shape == wanted.shape and not found.isnan().any()
    assert float((found.double() - wanted).abs().max()) < 0.02
    assert float((found.double() - wanted).abs().mean()) < 0.0015


@pytest.mark.parametrize(("heads", "size"), [(1, 32), (4, 64), (5, 96), (8, 32), (64, 64)])
@pytest.mark.parametrize(
    ("tokens", "begin", "reach", "ratio", "k"),
    [
        (1, 0, 16, 1, 4),
        (2, 31, 16, 2, 8),
        (33, 0, 128, 2, 40),
        (31, 33, 7, 1, 3),
        (130, 5, 16, 1, 64),
        (20, 300, 33, 1, 290),
        (64, 64, 1, 4, 16),
    ],
)
def test_a_chunk(
    kernels: Kernels, heads: int, size: int, tokens: int, begin: int, reach: int, ratio: int, k: int
) -> None:
    chunk = Chunk(tokens, begin, heads, size, ratio, k)
    assert_close(chunk.call(kernels, reach), chunk.by_hand(reach))


@given(
    tokens=st.integers(1, 70),
    begin=st.integers(0, 150),
    heads=st.integers(1, 6),
    reach=st.integers(1, 80),
    ratio=st.sampled_from([1, 2, 4]),
    k=st.integers(1, 60),
    entries=st.booleans(),
)
@settings(max_examples=25)
def test_any_chunk(
    kernels: Kernels, tokens: int, begin: int, heads: int, reach: int, ratio: int, k: int, entries: bool
) -> None:
    chunk = Chunk(tokens, begin, heads, 32, ratio, k, seed=begin)
    assert_close(chunk.call(kernels, reach, entries=entries), chunk.by_hand(reach, entries=entries))


def test_the_hand_agrees_with_the_model() -> None:
    chunk = Chunk(9, 4, 4, 64, 1, 3)
    back = torch.arange(4, 13).unsqueeze(1) - torch.arange(13)
    seen = torch.cat(((back >= 0) & (back < 5), selection_mask(chunk.chosen, 13)), dim=1)
    keys = torch.cat((chunk.keys, chunk.latents[:, :64])).float()
    wanted = dense_attention(chunk.query.float(), keys, seen, chunk.sink)
    torch.testing.assert_close(chunk.by_hand(5).float(), wanted, rtol=1e-5, atol=1e-6)


def test_what_is_not_chosen_is_not_seen_however_few_there_are(kernels: Kernels) -> None:
    """A follower may choose less than k although no more than k entries are visible."""
    chunk = Chunk(6, 10, 2, 32, 1, 40)
    chunk.chosen[:] = -1
    assert_close(chunk.call(kernels, 4), chunk.by_hand(4, entries=False))
    chunk.chosen[:, 7] = 3
    assert_close(chunk.call(kernels, 4), chunk.by_hand(4))


def test_logits_that_grow_and_fall_from_group_to_group(kernels: Kernels) -> None:
    """The running maximum: keys of 300 positions whose products with the query are a ramp, up or down."""
    chunk = Chunk(3, 600, 2, 32, 1, 1)
    for sign in (1, -1):
        chunk.keys[:] = 0
        chunk.keys[:, 0] = torch.linspace(-20, 20, 603).bfloat16() * sign
        chunk.keys[:, 1] = torch.arange(603) % 7
        chunk.query[:] = 0
        chunk.query[..., 0] = 12
        chunk.window = paged([noise(5, 32), chunk.keys])
        found, wanted = chunk.call(kernels, 590, entries=False), chunk.by_hand(590, entries=False)
        torch.testing.assert_close(found.double(), wanted, rtol=0.02, atol=0.02)


def test_a_chunk_cut_anywhere_says_the_same(kernels: Kernels) -> None:
    chunk = Chunk(50, 20, 4, 64, 1, 12)
    whole = chunk.call(kernels, 16)
    for cut in (1, 17, 32, 49):
        parts = [
            kernels.attend_span(
                chunk.query[part],
                20 + part.start,
                1,
                chunk.window,
                16,
                chunk.entries,
                chunk.chosen[part],
                chunk.sink,
            )
            for part in (slice(0, cut), slice(cut, 50))
        ]
        torch.testing.assert_close(torch.cat(parts).float(), whole.float(), rtol=0.02, atol=0.02)


def test_two_threads_give_the_same_bits(kernels: Kernels) -> None:
    chunk = Chunk(150, 40, 5, 64, 2, 30)
    whole = chunk.call(kernels, 16)
    with threads(2):
        assert torch.equal(chunk.call(kernels, 16), whole)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_poisoned_query_stays_in_its_row(kernels: Kernels, poison: float) -> None:
    chunk = Chunk(40, 10, 4, 64, 1, 12)
    clean = chunk.call(kernels, 16)
    chunk.query[7, 2, 3] = poison
    found = chunk.call(kernels, 16)
    assert found[7, 2].isnan().any()
    found[7, 2] = clean[7, 2]
    assert torch.equal(found, clean)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_poisoned_key_ends(kernels: Kernels, poison: float) -> None:
    chunk = Chunk(10, 10, 4, 64, 1, 12)
    chunk.keys[15, 3] = poison
    chunk.window = paged([noise(5, 64), chunk.keys])
    assert chunk.call(kernels, 16)[5:].isnan().any()


def test_a_silent_sink_and_a_loud_one(kernels: Kernels) -> None:
    chunk = Chunk(5, 3, 2, 32, 1, 4)
    chunk.sink = torch.tensor([-torch.inf, 300.0])
    found, wanted = chunk.call(kernels, 4), chunk.by_hand(4)
    assert_close(found[:, :1], wanted[:, :1])
    assert not found[:, 1].any()
