"""The command from end to end at a tiny size, and its refusals."""

from __future__ import annotations

import fcntl
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_deepinfer_plugins.draft.load import load_drafter
from vllm_deepinfer_plugins.model.weights import load_backbone
from vllm_deepinfer_plugins.train import command, stages
from vllm_deepinfer_plugins.train.export import export
from vllm_deepinfer_plugins.train.schedule import Schedule
from vllm_deepinfer_plugins.train.shape import config_fields

from tests.plugins.train.tiny import (
    FIELDS,
    OPTIONS,
    TOKENIZER,
    assert_same,
    backbone,
    drafter,
    source,
    weights,
)
from vllm_deepinfer.lessons.vocabulary import tokenizer

_NO_INTEGER = "Input should be a valid integer, unable to parse string as an integer"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of a few steps, in this process."""
    monkeypatch.setattr(stages, "OPTIONS", OPTIONS)
    monkeypatch.setattr(stages, "tokenizer", lambda: TOKENIZER)
    monkeypatch.setattr(stages, "taught", lambda words, later, seed, step: source(seed))
    plan: dict[str, Any] = {"tokens": 64, "lengths": ((0.0, 32),)}
    monkeypatch.setattr(stages, "Schedule", lambda steps: Schedule(steps, **plan))
    monkeypatch.setattr(stages, "draft_schedule", lambda steps: Schedule(steps, **plan, sparse=0.0))
    monkeypatch.setattr(command, "_prepare", lambda *settings: None)


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    """Exit code and the last line on stderr."""
    monkeypatch.setattr(sys, "argv", ["vllm-deepinfer-train", *arguments])
    with pytest.raises(SystemExit) as ended:
        command.main()
    code = ended.value.code
    return (0 if code is None else int(code)), capsys.readouterr().err.strip().split("\n")[-1]


@pytest.mark.usefixtures("tiny")
def test_from_nothing_to_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = ("--steps", "10", "--draft-steps", "10", "--processes", "1", "--seed", "3")
    code, last = call(monkeypatch, capsys, str(out), *options)
    assert code == 0 and last.startswith("drafter 10/10: cross_entropy ")
    backbone, drafter = load_backbone(out / "checkpoint"), load_drafter(out / "checkpoint")
    with torch.no_grad():
        assert bool(backbone.whole(torch.arange(40, 72).unsqueeze(0)).isfinite().all())
    assert drafter.confident
    found = json.loads((out / "checkpoint" / "figures.json").read_text())["training"]
    assert found["backbone"]["steps"] == 10 and found["backbone"]["tokens"] == 640
    assert found["drafter"]["curve"][0]["length"] >= 1 and found["backbone"]["settings"]["seed"] == 3
    quick = "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"
    assert found["backbone"]["settings"]["dtype"] == found["drafter"]["settings"]["dtype"] == quick
    assert found["backbone"]["parameters"] == sum(value.numel() for value in backbone.parameters())
    assert (out / "backbone.svg").read_text().startswith("<svg") and (out / "drafter.svg").is_file()

    # Finished: the same command has nothing to do and gives the same; another number of steps is refused.
    before = weights(backbone)
    assert call(monkeypatch, capsys, str(out), *options)[0] == 0
    assert_same(before, weights(load_backbone(out / "checkpoint")))
    code, last = call(monkeypatch, capsys, str(out), "--steps", "11", *options[2:])
    assert code == 2 and "was begun with other settings" in last and "name another folder" in last


@pytest.mark.usefixtures("tiny")
def test_a_drafter_for_a_backbone_that_is_there_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The drafter is the one that the whole training gave, and the backbone and what is said of it stay."""
    options = ("--draft-steps", "10", "--processes", "1", "--seed", "3")
    whole, alone = tmp_path / "whole", tmp_path / "alone"
    assert call(monkeypatch, capsys, str(whole), "--steps", "10", *options)[0] == 0
    given = str(whole / "checkpoint")
    assert call(monkeypatch, capsys, str(alone), "--backbone", given, *options)[0] == 0
    for load in (load_backbone, load_drafter):
        assert_same(weights(load(whole / "checkpoint")), weights(load(alone / "checkpoint")))
    first, second = (
        json.loads((out / "checkpoint" / "figures.json").read_text())["training"] for out in (whole, alone)
    )
    assert first["backbone"] == second["backbone"] and not (alone / "backbone.safetensors").exists()
    assert first["drafter"]["settings"] == second["drafter"]["settings"]

    # Another backbone is another training; one without figures has nothing said of it.
    other = tmp_path / "other"
    assert call(monkeypatch, capsys, str(other), "--steps", "20", *options)[0] == 0
    (other / "checkpoint" / "figures.json").write_text('{"training": []}')
    code, last = call(monkeypatch, capsys, str(alone), "--backbone", str(other / "checkpoint"), *options)
    assert code == 2 and "was begun with other settings" in last
    third = tmp_path / "third"
    assert call(monkeypatch, capsys, str(third), "--backbone", str(other / "checkpoint"), *options)[0] == 0
    assert "backbone" not in json.loads((third / "checkpoint" / "figures.json").read_text())["training"]


@pytest.mark.usefixtures("tiny")
def test_backbones_that_are_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(folder: Path) -> str:
        code, last = call(
            monkeypatch, capsys, str(tmp_path / "out"), "--backbone", str(folder), "--processes", "1"
        )
        assert code == 2
        return last

    assert str(tmp_path / "nothing") in refused(tmp_path / "nothing")
    undrafted = OPTIONS.model_copy(update={"dspark_blocks": 0})
    export(tmp_path / "undrafted", config_fields(TOKENIZER, undrafted), TOKENIZER, backbone(), None)
    assert "num_nextn_predict_layers is 0" in refused(tmp_path / "undrafted")
    export(tmp_path / "wordless", FIELDS, TOKENIZER, backbone(), drafter())
    for spoil in (Path.unlink, lambda path: path.write_text("{")):
        spoil(tmp_path / "wordless" / "tokenizer.json")
        assert "wordless/tokenizer.json cannot be used as a tokenizer (" in refused(tmp_path / "wordless")
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in refused(tmp_path / "file")
    export(tmp_path / "x", FIELDS, TOKENIZER, backbone(), drafter())
    monkeypatch.setattr(stages, "tokenizer", tokenizer)
    assert "has other tokens than the lessons" in refused(tmp_path / "x")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--steps", "0"), "--steps is 0: write 1 or more"),
        (("--draft-steps", "-1"), "--draft-steps is -1: write 1 or more"),
        (
            ("--steps", "3", "--backbone", "x"),
            "--steps is of a backbone to train, and --backbone names one: leave one of them out",
        ),
        (("--seed", "-1"), "--seed is -1: write 0 or more"),
        (("--processes", "3"), "--processes is 3: write 1, 2, 4 or 8, so that rows can be shared out"),
        (("--save-minutes", "nan"), "--save-minutes is nan: write a positive number"),
        (("--stepz", "3"), "No such option: --stepz (Possible options: --help, --seed, --steps)"),
        (
            ("--dtype", "half"),
            "Invalid value for '--dtype': Value error, 'half' is not one of 'auto', 'bfloat16', 'float32'.",
        ),
        (("--steps", "many"), f"Invalid value for '--steps': {_NO_INTEGER}"),
    ],
)
def test_refusals(
    arguments: tuple[str, ...],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, last = call(monkeypatch, capsys, str(tmp_path / "x"), *arguments)
    assert (code, last) == (2, f"vllm-deepinfer-train: error: {sentence}")
    assert not (tmp_path / "x").exists()


def test_a_folder_in_use_or_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, last = call(monkeypatch, capsys, str(tmp_path))
        assert code == 2 and "another training runs in" in last
    (tmp_path / "file").write_text("")
    code, last = call(monkeypatch, capsys, str(tmp_path / "file"))
    assert code == 2 and last.endswith("cannot be written (File exists): name a folder elsewhere")
