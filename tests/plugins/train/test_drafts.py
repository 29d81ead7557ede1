"""The drafter's training pass is its plain form."""

from __future__ import annotations

import torch
from vllm_deepinfer_plugins.draft.whole import features_of, teacher_forced
from vllm_deepinfer_plugins.kernels import load, suspended
from vllm_deepinfer_plugins.model.tiles import RowTiles
from vllm_deepinfer_plugins.train.drafts import DraftPass

from tests.plugins.train.tiny import backbone, drafter

LENGTH, SIZE = 64, 5


def test_logits_and_confidences_in_the_second_sequence_of_a_batch() -> None:
    model, drafts = backbone(), drafter()
    ids = torch.randint(10, 500, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    taps, anchors = model.config.dspark_target_layer_ids, torch.tensor([0, 3, 17, 40])
    with torch.no_grad():
        features = torch.cat([features_of(model, row, taps) for row in ids])
        expected, sure = teacher_forced(drafts, model, ids[1], features[LENGTH:], anchors)
        made = DraftPass(drafts, model.embed.weight, features, LENGTH, torch.float32)
        hidden, loads = made.run(ids.flatten(), anchors + LENGTH)
        previous = ids[1][anchors.unsqueeze(1) + torch.arange(SIZE)].flatten()
        bias, confidence = drafts.step(hidden, previous, RowTiles())
    assert confidence is not None
    torch.testing.assert_close(model.logits(hidden) + bias, expected.flatten(0, 1), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(confidence, sure.flatten(), atol=1e-4, rtol=1e-4)
    assert [float(load.sum()) for load in loads] == [len(anchors) * SIZE * 1.0] * 3


def test_an_anchor_does_not_see_the_sequence_before_its_own() -> None:
    model, drafts = backbone(), drafter()
    ids = torch.randint(10, 500, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    anchors = torch.tensor([LENGTH + 2])
    features = torch.randn(2 * LENGTH, 3 * 32, generator=torch.Generator().manual_seed(5))
    changed = features.clone()
    changed[:LENGTH] = 0
    with torch.no_grad():
        first, second = (
            DraftPass(drafts, model.embed.weight, given, LENGTH, torch.float32).run(ids.flatten(), anchors)[0]
            for given in (features, changed)
        )
    assert torch.equal(first, second)


def test_an_engines_kernels_in_the_process_change_nothing() -> None:
    model, drafts = backbone(), drafter()
    ids = torch.randint(10, 500, (LENGTH,), generator=torch.Generator().manual_seed(6))
    anchors = torch.tensor([2, 30])
    features = torch.randn(LENGTH, 3 * 32, generator=torch.Generator().manual_seed(7))
    with torch.no_grad(), suspended():
        made = DraftPass(drafts, model.embed.weight, features, LENGTH, torch.bfloat16)
        plain = made.run(ids, anchors)[0]
        load()  # as an engine in this process does
        assert torch.equal(plain, made.run(ids, anchors)[0])
