from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm_deepinfer_plugins.train import stages
from vllm_deepinfer_plugins.train.backbone import BackboneTraining

from tests.plugins.train.tiny import SCHEDULE, TOKENIZER, backbone, run
from vllm_deepinfer.lessons.stream import MIX


def test_what_is_taught_changes_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "documents", lambda seed, split, words, mix: iter([(seed, split, mix)]))
    for step, mix in ((0, MIX), (99, MIX), (100, stages.LATER), (500, stages.LATER)):
        taught: list[Any] = list(stages.taught(TOKENIZER, 100, 7, step))
        assert taught == [(7, "train", mix)]
    for mix in (MIX, stages.LATER, stages.DRAFTED):
        assert sum(mix.values()) == pytest.approx(1)
        assert set(mix) == set(MIX)


def test_the_drafter_has_a_mix_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "documents", lambda seed, split, words, mix: iter([(seed, split, mix)]))
    for step in (0, 5000):
        assert list(stages.drafted(TOKENIZER, 7, step)) == [(7, "train", stages.DRAFTED)]  # type: ignore[comparison-overlap]


def test_the_drafter_learns_with_the_selection_in_force() -> None:
    plan = stages.draft_schedule(50)
    assert plan.selects(0) and plan.shape(0) == plan.shape(49) == (8, 512)


def test_figures_say_how_the_weights_came_about(tmp_path: Path) -> None:
    training = BackboneTraining(backbone(), run(tmp_path), SCHEDULE)
    training.step, training.seconds = 10, 12.345
    training.curve = [{"step": 10, "bits": 2.123456, "divergence": 0.5, "speed": 1000.0}]
    stages.write_figures(tmp_path, {"backbone": stages.figures_of(training)}, 1234)
    found = json.loads((tmp_path / "figures.json").read_text())["training"]
    own = found["backbone"]
    assert (own["steps"], own["tokens"], own["seconds"]) == (10, 10 * 128, 12.3)
    assert own["curve"] == [{"step": 10, "bits": 2.1235, "divergence": 0.5, "speed": 1000.0}]
    assert own["settings"]["schedule"]["lengths"] == [[0.0, 32], [0.5, 64]]
    assert found["weight_bytes"] == 1234 and own["machine"]["processes"] == 1
