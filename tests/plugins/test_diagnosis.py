"""A damaged checkpoint is named, whoever stumbled over it first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm_deepinfer_plugins.diagnosis import diagnosis, model_of

from tests.plugins.model import engines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return engines.checkpoint(engines.NAMES[0], tmp_path)


def change(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_a_good_one(folder: Path) -> None:
    assert diagnosis(str(folder)) is None


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"sliding_window": 16.5}, "sliding_window"),
        ({"max_position_embeddings": "a"}, "max_position_embeddings"),
    ],
)
def test_a_field_of_the_language_model(folder: Path, damage: dict[str, Any], word: str) -> None:
    text = json.loads((folder / "config.json").read_text())["text_config"]
    change(folder, text_config=text | damage)
    sentence = diagnosis(str(folder))
    assert sentence is not None and word in sentence and "\n" not in sentence


@pytest.mark.parametrize("text", ["", "{", "[1]", "3"])
def test_no_json_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    sentence = diagnosis(str(folder))
    assert sentence is not None and "config.json" in sentence and "\n" not in sentence


def test_text_config_of_another_kind(folder: Path) -> None:
    change(folder, text_config=[1])
    assert "text_config" in (diagnosis(str(folder)) or "")


def test_a_missing_weight_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert diagnosis(str(folder)) is not None


def test_what_is_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "hidden_size": "x"}')
    assert diagnosis(str(tmp_path)) is None
    assert diagnosis(str(tmp_path / "nowhere")) is None
    assert diagnosis("some/hub-name") is None
    assert diagnosis(None) is None


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        (["vllm", "serve", "a/b", "--port", "1"], "a/b"),
        (["vllm", "serve", "--port", "1", "--model", "a/b"], "a/b"),
        (["vllm", "serve", "--model=a/b"], "a/b"),
        (["vllm", "serve", "--port", "1"], None),
        (["vllm", "bench", "latency", "--model", "a/b"], "a/b"),
        (["vllm", "serve", "--model"], None),
        (["vllm"], None),
    ],
)
def test_the_model_of_a_command_line(arguments: list[str], model: str | None) -> None:
    assert model_of(arguments) == model
