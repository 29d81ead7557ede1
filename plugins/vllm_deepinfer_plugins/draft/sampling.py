"""Tokens of a block, left to right: base logits and the Markov bias of the token before."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..model.tiles import RowTiles
from .blocks import Drafter


@dataclass(frozen=True)
class Draws:
    """How tokens are drawn.

    Attributes:
        temperatures: [n] float32; 0: the likeliest token. None: of all of them.
        generators: by row, of requests with a seed; the others use PyTorch's own.
    """

    temperatures: torch.Tensor | None = None
    generators: dict[int, torch.Generator] | None = None


@dataclass(frozen=True)
class Block:
    """Drafts of n anchors.

    Attributes:
        tokens: [n, count] int64.
        confidences: [n, count] float32, not calibrated, or None where there is no head.
        probabilities: [n, count, vocab] float32 that the tokens were drawn from; None: not drawn.
    """

    tokens: torch.Tensor
    confidences: torch.Tensor | None
    probabilities: torch.Tensor | None


def draw_block(
    drafter: Drafter,
    hidden: torch.Tensor,
    logits: torch.Tensor,
    anchors: torch.Tensor,
    count: int,
    tiles: RowTiles,
    draws: Draws = Draws(),
) -> Block:
    """The first ``count`` drafts of each anchor.

    Args:
        hidden: [n, γ, hidden], normalised.
        logits: [n, ≥ count, vocab] float32, without Markov bias.
        anchors: [n] token ids.
    """
    previous, tokens, confidences, probabilities = anchors, [], [], []
    for place in range(count):
        bias, confidence = drafter.step(hidden[:, place], previous, tiles)
        scores = logits[:, place] + bias
        if confidence is not None:
            confidences.append(confidence.sigmoid())
        if draws.temperatures is None:
            previous = scores.argmax(-1)
        else:
            previous, chances = _draw(scores, draws.temperatures, draws.generators or {})
            probabilities.append(chances)
        tokens.append(previous)
    return Block(
        torch.stack(tokens, 1),
        torch.stack(confidences, 1) if confidences else None,
        torch.stack(probabilities, 1) if probabilities else None,
    )


def _draw(
    scores: torch.Tensor, temperatures: torch.Tensor, generators: dict[int, torch.Generator]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token per row and the probabilities [n, vocab] that it came from: one-hot at temperature 0."""
    greedy = temperatures < 1e-5
    chances = (scores / torch.where(greedy, 1.0, temperatures).unsqueeze(-1)).softmax(-1)
    best = scores.argmax(-1)
    # Exponential races: the token with the least e / p wins with probability p.
    noise = torch.empty_like(chances).exponential_()
    for row, generator in generators.items():
        noise[row].exponential_(generator=generator)
    drawn = (chances / noise.clamp_min(torch.finfo(noise.dtype).tiny)).argmax(-1)
    certain = torch.zeros_like(chances).scatter_(1, best.unsqueeze(-1), 1.0)
    return torch.where(greedy, best, drawn), torch.where(greedy.unsqueeze(-1), certain, chances)
