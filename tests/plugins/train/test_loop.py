"""A stopped training goes on with the weights that it would have had; two with one seed are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm_deepinfer_plugins.train.backbone import BackboneTraining
from vllm_deepinfer_plugins.train.drafter import DrafterTraining, choose_anchors
from vllm_deepinfer_plugins.train.loop import NotFiniteError
from vllm_deepinfer_plugins.train.optimizer import Rates
from vllm_deepinfer_plugins.train.schedule import Schedule
from vllm_deepinfer_plugins.train.shape import build_backbone, build_drafter

from tests.plugins.train.tiny import FIELDS, SCHEDULE, TOKENIZER, assert_same, run, weights
from vllm_deepinfer.checkpoint.errors import CheckpointError

DRAFT = Schedule(6, tokens=128, lengths=((0.0, 64),), sparse=0.0)


def trained(
    folder: Path, *stops: int, seed: int = 0
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Weights and curve of a training that was stopped at steps, and taken up from its file alone."""
    for stop in (*stops, SCHEDULE.steps):
        training = BackboneTraining(build_backbone(FIELDS, TOKENIZER, seed), run(folder, seed), SCHEDULE)
        training.run(lambda point: None, stop)
    return weights(training.model), training.curve


def test_stopped_and_resumed_is_the_same(tmp_path: Path) -> None:
    whole, curve = trained(tmp_path / "a")
    again, _ = trained(tmp_path / "b", 3, 8)
    assert_same(whole, again)
    assert [point["step"] for point in curve] == [10, 12]
    other, _ = trained(tmp_path / "c", seed=1)
    assert any(not torch.equal(value, other[name]) for name, value in whole.items())


def test_it_learns(tmp_path: Path) -> None:
    schedule = Schedule(40, tokens=128, lengths=((0.0, 32),), sparse=0.5)
    bits: list[float] = []
    training = BackboneTraining(build_backbone(FIELDS, TOKENIZER, 0), run(tmp_path), schedule)
    training.run(lambda point: bits.append(point["bits"]))
    assert bits[-1] < 6 < bits[0], "counting upwards is easy, and a unigram model has 6.6 bits"
    bias = training.backbone.layers[0].ffn.gate.bias
    assert 0 < float(bias.abs().max()) <= 40 * 1e-3


def test_a_loss_that_is_no_number_ends_it(tmp_path: Path) -> None:
    training = BackboneTraining(build_backbone(FIELDS, TOKENIZER, 0), run(tmp_path), SCHEDULE)
    with torch.no_grad():
        training.backbone.head.weight.fill_(float("nan"))
    with pytest.raises(NotFiniteError, match="step 10 is no number: lower the rates"):
        training.run(lambda point: None)
    assert not training.file.exists()


def test_other_settings_are_refused(tmp_path: Path) -> None:
    BackboneTraining(build_backbone(FIELDS, TOKENIZER, 0), run(tmp_path), SCHEDULE).run(lambda point: None, 1)
    with pytest.raises(CheckpointError, match=r"begun with other settings .* name another folder"):
        BackboneTraining(build_backbone(FIELDS, TOKENIZER, 0), run(tmp_path), SCHEDULE, Rates(matrix=0.5))


def test_the_drafter_learns_and_leaves_the_backbone_alone(tmp_path: Path) -> None:
    backbone = build_backbone(FIELDS, TOKENIZER, 0)
    before = weights(backbone)
    results = []
    for stops in ((6,), (2, 6)):
        for stop in stops:
            drafter = build_drafter(FIELDS, 0)
            training = DrafterTraining(drafter, backbone, run(tmp_path / str(len(stops))), DRAFT)
            training.run(lambda point: None, stop)
        results.append(weights(drafter))
    assert_same(before, weights(backbone))
    assert_same(*results)
    assert training.curve[-1].keys() == {
        "step",
        "cross_entropy",
        "variation",
        "confidence",
        "length",
        "speed",
    }
    assert training.curve[-1]["length"] >= 1


def test_anchors_lie_where_the_next_token_counts() -> None:
    targets = torch.full((2, 12), -100)
    targets[0, 2:5], targets[1, 6:] = 7, 7
    every = choose_anchors(targets, 5, (0,), 100)
    assert every.tolist() == [2, 3, 4, 12 + 6, 12 + 7], "with room for five places"
    some = choose_anchors(targets, 5, (0,), 3)
    assert len(some) == 3 and set(some.tolist()) < set(every.tolist())
    assert torch.equal(some, choose_anchors(targets, 5, (0,), 3))
