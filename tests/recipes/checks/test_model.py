"""The model: where it is, its tokenizer, its number format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.samples import ALONE, faults
from vllm_deepinfer.checkpoint import trained
from vllm_deepinfer.checkpoint.options import TinyOptions
from vllm_deepinfer.checkpoint.tiny import write_checkpoint
from vllm_deepinfer.recipes.checks.model import check_model


def told(model: dict[str, Any], **changes: Any) -> list[str]:
    return faults(ALONE, check=check_model, model=model, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", TinyOptions(layers=4)).folder


def test_models_that_are_there(folder: Path) -> None:
    assert told({"path": str(folder)}) == []
    assert told({"tiny": {"layers": 6, "encoding": "bf16"}}) == []
    assert told({"path": "deepseek-ai/DeepSeek-V4.1-Flash"}) == []
    assert told({"path": str(folder), "tokenizer": str(folder)}) == []


def test_one_of_path_and_tiny() -> None:
    sentence = "model needs one of path, trained and tiny: write one of them."
    assert told({}) == [sentence]
    assert told({"path": "x", "tiny": {}}) == [sentence]
    assert told({"trained": {}, "tiny": {}}) == [sentence]


def test_the_trained_model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained, "FOLDER", folder)
    assert told({"trained": {}}) == []
    assert told({"trained": {}, "tokenizer": str(folder)}) == [
        "model.tokenizer is given, but a trained model has a tokenizer of its own: leave it out."
    ]
    monkeypatch.setattr(trained, "FOLDER", tmp_path)
    assert told({"trained": {}}) == [
        f"model.trained: {tmp_path} has no config.json, so this installation lacks the trained checkpoint: "
        "install it again, or use a tiny one with random weights."
    ]


def test_models_that_are_not_there(tmp_path: Path) -> None:
    assert told({"path": "someone/else"}) == [
        "model.path is someone/else, which is no folder on this machine: download it and name its folder; "
        "without one, only deepseek-ai/DeepSeek-V4.1-Flash is known."
    ]
    found = told({"path": str(tmp_path)})
    assert found[0] == (
        f"model.path is {tmp_path}: {tmp_path}/config.json cannot be read (No such file or directory): "
        "name a "
        "checkpoint folder."
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert told({"path": str(tmp_path)}) == [
        f'model.path is {tmp_path}: model_type is "llama": name a DeepSeek-V4.1 checkpoint, whose type is '
        '"deepseek_v41".'
    ]


def test_tiny_models_that_cannot_be() -> None:
    assert told({"tiny": {"layers": 8, "top_k": 9}}) == [
        "model.tiny: text_config.num_experts_per_tok is 9: write at most n_routed_experts 8."
    ]


@pytest.mark.parametrize(
    ("content", "rest"),
    [
        (None, "which has no tokenizer.json: copy the model's tokenizer.json there."),
        ("{", "whose tokenizer.json cannot be read: download it again."),
        ("[" * 100_000, "whose tokenizer.json cannot be read: download it again."),
        ("[]", "whose tokenizer.json is no tokenizer: download it again."),
    ],
)
def test_tokenizers_that_cannot_be_used(content: str | None, rest: str, folder: Path, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    assert told({"path": str(folder), "tokenizer": str(tmp_path)}) == [
        f"model.tokenizer is {tmp_path}, {rest}"
    ]


def test_a_tokenizer_beside_a_tiny_model(folder: Path) -> None:
    assert told({"tiny": {}, "tokenizer": str(folder)}) == [
        "model.tokenizer is given, but a tiny model has a tokenizer of its own: leave it out."
    ]


def test_number_formats_of_cpu_engines() -> None:
    assert told({"tiny": {}, "dtype": "float16"}) == [
        "model.dtype is float16, but pools.all runs on CPUs, whose class computes in bfloat16 or float32: "
        "write "
        "one of these."
    ]
    assert told({"tiny": {}, "dtype": "float16"}, pools__all__resources={"gpus": 1}) == []


def test_a_name_twice() -> None:
    assert told({"tiny": {}, "served_name": "a", "aliases": ["b", "a"]}) == [
        "model.aliases has the name a that the model has already: drop it."
    ]
