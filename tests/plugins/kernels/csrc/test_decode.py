"""Attention of single rows against a loop over keys in float64."""

from __future__ import annotations

import pytest
import torch
from vllm_deepinfer_plugins.kernels import Kernels, Paged
from vllm_deepinfer_plugins.model.attention import sink_attention

from ..samples import assert_near, noise, paged
from ..variants import threads

LENGTHS = (40, 3, 75, 1)


class Rows:
    """Rows of four requests: window and entries in blocks, some entries chosen.

    Args:
        positions: Pairs of request and position.
        k: Columns of ``chosen``; about a third of them are none, anywhere.
    """

    def __init__(self, positions: list[tuple[int, int]], heads: int, size: int, ratio: int, k: int) -> None:
        self.requests, self.positions = torch.tensor(positions).T.contiguous()
        self.tokens = [noise(length, size, seed=length) for length in LENGTHS]
        counts = [max(length // ratio, 1) for length in LENGTHS]
        self.latents = [noise(count, size + 32, seed=count + 1) for count in counts]
        self.window, self.entries = paged(self.tokens), paged(self.latents, block=4 * ratio, ratio=ratio)
        self.query, self.sink = noise(len(positions), heads, size), noise(heads, dtype=torch.float32, seed=3)
        visible = (self.positions + 1) // ratio
        order = torch.rand(len(positions), 75, generator=torch.Generator().manual_seed(k)).argsort(1)[:, :k]
        self.chosen = torch.where(order < visible.unsqueeze(1), order, -1)
        self.size = size

    def call(self, kernels: Kernels, reach: int, rows: list[int] | slice = slice(None)) -> torch.Tensor:
        return kernels.attend_rows(
            self.query[rows],
            self.positions[rows],
            self.requests[rows],
            self.window,
            reach,
            self.entries,
            self.chosen[rows],
            self.sink,
        )

    def by_hand(self, row: int, reach: int, *, entries: bool = True) -> torch.Tensor:
        """[1, heads, size] in float64."""
        request, position = int(self.requests[row]), int(self.positions[row])
        keys = self.tokens[request][max(position - reach + 1, 0) : position + 1]
        if entries:
            chosen = self.chosen[row][self.chosen[row] >= 0]
            keys = torch.cat((keys, self.latents[request][chosen, : self.size]))
        logits = self.query[row].double() @ keys.double().T * self.size**-0.5
        powers = logits.exp()
        weights = powers / (powers.sum(1, keepdim=True) + self.sink.double().exp().unsqueeze(1))
        return (weights @ keys.double()).unsqueeze(0)


PLACES = [(0, 39), (2, 74), (1, 0), (3, 0), (2, 16), (0, 5), (1, 2)]


@pytest.mark.parametrize(("ratio", "k"), [(1, 1), (1, 33), (2, 16), (4, 5)])
@pytest.mark.parametrize("reach", [1, 7, 16, 200])
@pytest.mark.parametrize(("heads", "size"), [(1, 32), (4, 64), (5, 16), (8, 96), (3, 128), (64, 48)])
def test_each_row_over_its_own_keys(
    kernels: Kernels, heads: int, size: int, reach: int, ratio: int, k: int
) -> None:
    rows = Rows(PLACES, heads, size, ratio, k)
    found = rows.call(kernels, reach)
    for row in range(len(PLACES)):
        assert_near(found[row : row + 1], rows.by_hand(row, reach), slack=2e-5)


def test_the_hand_agrees_with_the_model() -> None:
    rows = Rows(PLACES, 4, 64, 1, 8)
    seen = torch.ones(1, 1 + int((rows.chosen[1] >= 0).sum()), dtype=torch.bool)
    keys = torch.cat((rows.tokens[2][74:], rows.latents[2][rows.chosen[1][rows.chosen[1] >= 0], :64]))
    wanted = sink_attention(rows.query[1:2].float(), keys.float().unsqueeze(0), seen, rows.sink)
    torch.testing.assert_close(rows.by_hand(1, 1).float(), wanted, rtol=1e-5, atol=1e-6)


def test_without_entries(kernels: Kernels) -> None:
    rows = Rows(PLACES, 5, 64, 1, 1)
    found = kernels.attend_rows(
        rows.query, rows.positions, rows.requests, rows.window, 9, None, None, rows.sink
    )
    for row in range(len(PLACES)):
        assert_near(found[row : row + 1], rows.by_hand(row, 9, entries=False), slack=2e-5)


def test_a_real_layers_sizes(kernels: Kernels) -> None:
    rows = Rows([(2, 74), (0, 39)], 64, 512, 1, 75)
    found = rows.call(kernels, 128)
    for row in range(2):
        assert_near(found[row : row + 1], rows.by_hand(row, 128), slack=2e-5)


@pytest.mark.parametrize(("sink", "share"), [(-torch.inf, 1.0), (0.0, 0.5), (200.0, 0.0)])
def test_the_sink_takes_its_share(kernels: Kernels, sink: float, share: float) -> None:
    """One key, at right angles to the query: weight e^0 / (e^0 + e^sink)."""
    key, query = torch.zeros(1, 32).bfloat16(), torch.zeros(1, 1, 32).bfloat16()
    key[0, 0], query[0, 0, 1] = 4, 4
    zero = torch.zeros(1, dtype=torch.int64)
    found = kernels.attend_rows(query, zero, zero, paged([key]), 5, None, None, torch.full((1,), sink))
    assert float(found[0, 0, 0]) == 4 * share and found[0, 0, 1:].count_nonzero() == 0


def test_large_logits_do_not_overflow(kernels: Kernels) -> None:
    rows = Rows(PLACES, 4, 64, 1, 8)
    rows.query = rows.query * 500
    found = rows.call(kernels, 16)
    best = (rows.query[0].double() @ rows.tokens[0].double()[24:40].T).amax(1)
    assert found.isfinite().all() and best.shape == (4,)


@pytest.mark.parametrize("heads", [4, 7])
def test_a_row_has_the_same_bits_in_any_company(kernels: Kernels, heads: int) -> None:
    rows = Rows(PLACES * 6, heads, 96, 2, 20)
    whole = rows.call(kernels, 16)
    for some in ([0], [41], [13, 2, 2, 39], list(range(41, -1, -1))):
        assert torch.equal(rows.call(kernels, 16, some), whole[some])
    with threads(2):
        assert torch.equal(rows.call(kernels, 16), whole)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_poison_stays_in_its_row(kernels: Kernels, poison: float) -> None:
    rows = Rows(PLACES, 5, 64, 1, 8)
    clean = rows.call(kernels, 16)
    rows.query[3, 2, 7] = poison
    found = rows.call(kernels, 16)
    found[3, 2] = clean[3, 2]
    assert torch.equal(found, clean)


def test_no_rows(kernels: Kernels) -> None:
    window, none = paged([noise(3, 32)]), torch.empty(0, dtype=torch.int64)
    found = kernels.attend_rows(noise(0, 4, 32), none, none, window, 5, None, None, torch.zeros(4))
    assert found.shape == (0, 4, 32)


def test_views_are_what_paged_says() -> None:
    assert isinstance(Rows(PLACES, 1, 32, 2, 1).entries, Paged)
