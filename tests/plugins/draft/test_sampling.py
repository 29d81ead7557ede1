"""Tokens of a block: the likeliest left to right, or drawn from the distribution that is reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm_deepinfer_plugins.draft.sampling import Block, Draws, draw_block
from vllm_deepinfer_plugins.model.tiles import RowTiles

VOCAB, COUNT, HIDDEN = 6, 3, 4


LIKELIEST = Draws()


class Chain:
    """A drafter of which only the heads count: a bias that makes token t + 1 follow t, or what is given."""

    def __init__(self, bias: torch.Tensor | None = None, *, confident: bool = True) -> None:
        rows = 10.0 * torch.eye(VOCAB).roll(1, dims=1)
        self.bias, self.confident = rows if bias is None else bias, confident
        self.asked: list[list[int]] = []

    def step(self, hidden: torch.Tensor, previous: torch.Tensor, tiles: RowTiles) -> Any:
        self.asked.append(previous.tolist())
        sure = hidden.sum(-1) + previous if self.confident else None
        return self.bias[previous], sure


def drawn(
    drafter: Chain, anchors: list[int], logits: torch.Tensor | None = None, draws: Draws = LIKELIEST
) -> Block:
    count = len(anchors)
    hidden = torch.arange(count * COUNT * HIDDEN).view(count, COUNT, HIDDEN) / 100
    base = torch.zeros(count, COUNT, VOCAB) if logits is None else logits
    return draw_block(drafter, hidden, base, torch.tensor(anchors), COUNT, RowTiles(), draws)  # type: ignore[arg-type]


def test_each_token_s_bias_is_that_of_the_token_before() -> None:
    drafter = Chain()
    block = drawn(drafter, [0, 4])
    assert block.tokens.tolist() == [[1, 2, 3], [5, 0, 1]]
    assert drafter.asked == [[0, 4], [1, 5], [2, 0]]
    assert block.probabilities is None


def test_base_logits_of_each_place_count() -> None:
    logits = torch.zeros(1, COUNT, VOCAB)
    logits[0, 1, 5] = 11.0
    assert drawn(Chain(), [0], logits).tokens.tolist() == [[1, 5, 0]]


def test_confidences_look_at_the_token_before_and_never_at_the_draft() -> None:
    confidences = drawn(Chain(), [0]).confidences
    assert confidences is not None
    sums = torch.tensor([0.06, 0.22, 0.38]) + torch.tensor([0, 1, 2])
    torch.testing.assert_close(confidences, sums.sigmoid().unsqueeze(0))


def test_without_a_head_there_are_none() -> None:
    assert drawn(Chain(confident=False), [0]).confidences is None


def test_fewer_than_a_block() -> None:
    logits = torch.zeros(1, COUNT, VOCAB)
    block = draw_block(Chain(), logits[..., :HIDDEN], logits, torch.tensor([2]), 1, RowTiles())  # type: ignore[arg-type]
    assert block.tokens.tolist() == [[3]]


def test_temperature_0_is_the_likeliest_with_all_its_probability() -> None:
    block = drawn(Chain(), [0, 4], draws=Draws(torch.zeros(2)))
    assert block.tokens.tolist() == [[1, 2, 3], [5, 0, 1]]
    assert block.probabilities is not None
    assert torch.equal(block.probabilities, torch.eye(VOCAB)[block.tokens])


def test_probabilities_are_those_of_the_temperature_given_the_token_before() -> None:
    bias = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
    logits = torch.randn(2, COUNT, VOCAB, generator=torch.Generator().manual_seed(1))
    temperatures = torch.tensor([0.5, 2.0])
    block = drawn(Chain(bias), [3, 1], logits, Draws(temperatures))
    before = torch.cat((torch.tensor([[3], [1]]), block.tokens[:, :-1]), dim=1)
    wanted = ((logits + bias[before]) / temperatures.view(2, 1, 1)).softmax(-1)
    torch.testing.assert_close(block.probabilities, wanted)


def test_draws_follow_the_probabilities() -> None:
    """20,000 rows of one distribution: within five standard deviations, token by token."""
    bias, count = torch.zeros(VOCAB, VOCAB), 20_000
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0, -30.0]).expand(count, COUNT, VOCAB)
    torch.manual_seed(0)
    block = drawn(Chain(bias), [0] * count, logits, Draws(torch.full((count,), 1.5)))
    chances = (logits[0, 0] / 1.5).softmax(-1)
    for place in range(COUNT):
        found = torch.bincount(block.tokens[:, place], minlength=VOCAB) / count
        assert ((found - chances).abs() <= 5 * (chances * (1 - chances) / count).sqrt()).all()


@pytest.mark.parametrize("company", [[], [2, 5]])
def test_a_seeded_request_draws_the_same_in_any_company(company: list[int]) -> None:
    anchors = [1, *company]
    logits = torch.zeros(len(anchors), COUNT, VOCAB)

    def tokens() -> list[int]:
        draws = Draws(torch.ones(len(anchors)), {0: torch.Generator().manual_seed(7)})
        found: list[int] = drawn(Chain(torch.zeros(VOCAB, VOCAB)), anchors, logits, draws).tokens[0].tolist()
        return found

    alone = Draws(torch.ones(1), {0: torch.Generator().manual_seed(7)})
    wanted = drawn(Chain(torch.zeros(VOCAB, VOCAB)), [1], logits[:1], alone).tokens[0].tolist()
    assert tokens() == tokens() == wanted
