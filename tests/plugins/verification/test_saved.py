"""The calibration that an engine starts from, and the one sentence for a file that cannot be that."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_deepinfer_plugins.settings import Settings
from vllm_deepinfer_plugins.verification.saved import calibration_of, names_of

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.policy.calibration import Calibration, dumps

TARGET, DRAFTER = "/models/v41", "custom_class:a.Proposer"


def config() -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(model=TARGET),
        speculative_config=SimpleNamespace(method="custom_class", model="a.Proposer"),
    )


def settings(path: Path) -> Settings:
    return Settings(calibration_file=str(path))


def refusal(path: Path, positions: int = 3) -> str:
    with pytest.raises(UserError) as error:
        calibration_of(config(), settings(path), positions)
    message = str(error.value)
    assert "\n" not in message and f'["calibration_file"] is {path}, ' in message
    return message


def test_the_names_of_target_and_drafter() -> None:
    assert names_of(config()) == (TARGET, DRAFTER)


def test_a_folder_is_named_by_its_weights_wherever_it_lies(tmp_path: Path) -> None:
    names = []
    for folder, weights in (("a", b"\x01" * 64), ("b", b"\x01" * 64), ("c", b"\x02" * 64)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
        (tmp_path / folder / "model.bin").write_bytes(weights)
        config_ = config()
        config_.model_config.model = str(tmp_path / folder)
        config_.speculative_config.model = str(tmp_path / folder)
        names.append(names_of(config_))
    assert names[0] == names[1] != names[2]
    assert all(
        target.startswith("sha256:") and drafter == f"custom_class:{target}" for target, drafter in names
    )


def test_without_the_setting_there_is_none() -> None:
    assert calibration_of(config(), Settings(), 3) is None


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    path, saved = tmp_path / "calibration.json", Calibration((0.5, 1.0, 2.25))
    path.write_text(dumps(saved, TARGET, DRAFTER))
    assert calibration_of(config(), settings(path), 3) == saved


def test_of_another_number_of_drafts(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(dumps(Calibration.identity(3), TARGET, DRAFTER))
    assert refusal(path, 5).endswith("for 3 drafts, and num_speculative_tokens is 5: fit another")


@pytest.mark.parametrize(
    ("target", "drafter", "wanted"),
    [("/models/other", DRAFTER, "fitted for target"), (TARGET, "ngram:ngram", "fitted for drafter")],
)
def test_of_another_model(tmp_path: Path, target: str, drafter: str, wanted: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(dumps(Calibration.identity(3), target, drafter))
    assert wanted in refusal(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "(No such file or directory): write the path" in refusal(tmp_path / "none.json")
    assert "(Is a directory)" in refusal(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    assert "(it is no text)" in refusal(tmp_path / "bytes")


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        json.dumps({"format": 2}),
        json.dumps({"format": 1, "target": TARGET, "drafter": DRAFTER, "temperatures": [1, 0, 1]}),
        json.dumps({"format": 1, "target": TARGET, "drafter": DRAFTER, "temperatures": ["1", 1, 1]}),
        json.dumps({"format": 1, "target": TARGET, "drafter": DRAFTER, "temperatures": [10**400] * 3}),
    ],
)
def test_damaged_files(tmp_path: Path, content: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(content)
    assert "which cannot be used: " in refusal(path)
