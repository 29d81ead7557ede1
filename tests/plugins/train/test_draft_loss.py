from __future__ import annotations

import math

import pytest
import torch
from vllm_deepinfer_plugins.train.draft_loss import draft_loss, expected_length

SIZE = 5


def test_against_the_formulas_written_out() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, target = torch.randn(2, 3, SIZE, 7, generator=generator)
    confidence = torch.randn(3, SIZE, generator=generator)
    tokens = torch.randint(0, 7, (3, SIZE), generator=generator)
    tokens[2, 3:] = -100
    loss = draft_loss(logits, confidence, target, tokens)
    sums, total = [0.0, 0.0, 0.0], 0.0
    for anchor in range(3):
        for place in range(SIZE):
            if tokens[anchor, place] < 0:
                continue
            weight = math.exp(-place / SIZE)
            draft, truth = logits[anchor, place].softmax(0), target[anchor, place].softmax(0)
            distance = float((draft - truth).abs().sum())
            label, sure = 1 - distance / 2, float(confidence[anchor, place].sigmoid())
            cross = -math.log(float(draft[tokens[anchor, place]]))
            binary = -label * math.log(sure) - (1 - label) * math.log(1 - sure)
            for part, value in enumerate((cross, distance, binary)):
                sums[part] += weight * value
            total += weight
    cross, distance, binary = (value / total for value in sums)
    assert loss.cross_entropy.item() == pytest.approx(cross, abs=1e-5)
    assert loss.variation.item() == pytest.approx(distance, abs=1e-5)
    assert loss.confidence.item() == pytest.approx(binary, abs=1e-5)
    assert loss.total.item() == pytest.approx(0.1 * cross + 0.9 * distance + binary, abs=1e-5)


def test_a_perfect_drafter_is_always_accepted() -> None:
    logits = torch.randn(4, SIZE, 9, generator=torch.Generator().manual_seed(1))
    loss = draft_loss(logits, torch.full((4, SIZE), 20.0), logits, torch.zeros(4, SIZE, dtype=torch.long))
    torch.testing.assert_close(loss.accepted, torch.ones(SIZE))
    assert loss.variation.item() == pytest.approx(0, abs=1e-6)
    assert loss.confidence.item() == pytest.approx(0, abs=1e-6)
    assert expected_length(loss.accepted) == pytest.approx(6)


def test_the_confidence_does_not_pull_at_the_drafts() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2, SIZE, 5, generator=generator, requires_grad=True)
    target = torch.randn(2, SIZE, 5, generator=generator)
    tokens = torch.zeros(2, SIZE, dtype=torch.long)
    gradients = [
        torch.autograd.grad(draft_loss(logits, confidence, target, tokens).total, logits)[0]
        for confidence in (torch.zeros(2, SIZE), torch.full((2, SIZE), 3.0))
    ]
    assert torch.equal(*gradients) and bool(gradients[0].any())
