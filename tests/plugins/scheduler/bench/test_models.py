"""The benchmark's models are what they are said to be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllm_deepinfer_plugins.scheduler.bench import models
from vllm_deepinfer_plugins.scheduler.bench.command import FULL, QUICK, cost_of

from vllm_deepinfer.bench.registry import installed
from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE, AttentionBound


@pytest.mark.parametrize(("quick", "layers"), [(True, 2), (False, 4)])
def test_the_dense_model(tmp_path: Path, quick: bool, layers: int) -> None:
    path = models.write(models.DENSE, tmp_path, quick)
    config = json.loads((path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (layers, 512)
    assert config["max_position_embeddings"] >= models.LONGEST[models.DENSE]


def test_v41_reaches_the_longest_sequence(tmp_path: Path) -> None:
    path = models.write(models.V41, tmp_path, True)
    text = json.loads((path / "config.json").read_text())["text_config"]
    assert text["max_position_embeddings"] == models.LONGEST[models.V41]


@pytest.mark.parametrize("plan", [QUICK, FULL])
def test_every_prompt_fits_and_every_target_is_in_the_grid(plan: object) -> None:
    assert isinstance(plan, type(QUICK))
    from vllm_deepinfer.bench.scheduler.traffic import MIXES

    for model in models.MODELS:
        longest = max(mix.divided(models.DIVIDED[model]).longest for mix in MIXES)
        assert longest < models.LONGEST[model]
    assert set(plan.targets) <= set(plan.grid)
    assert all(4 in plan.decodes[model] for model in models.MODELS)


def test_the_issue_asks_for_this_much_of_a_full_run() -> None:
    assert FULL.rounds >= 3 and FULL.decodes[models.DENSE] == (1, 4, 16)
    assert {s.chunk for s in FULL.grid} == {128, 256, 512, 1024, 2048, 8192}
    assert {s.threshold for s in FULL.grid} == {0, 256, 512}


def test_a_cost_comes_back_from_the_wire() -> None:
    from dataclasses import asdict, replace

    cost = replace(TWO_CORE_DENSE, attention=AttentionBound(128, 64))
    assert cost_of(json.loads(json.dumps(asdict(cost)))) == cost


def test_the_command_is_registered() -> None:
    assert installed()["scheduler"].value == "vllm_deepinfer_plugins.scheduler.bench.command:run"
