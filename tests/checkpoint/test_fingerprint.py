"""Fingerprints: equal for copies, different for anything that changes an answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_deepinfer.checkpoint.errors import CheckpointError
from vllm_deepinfer.checkpoint.fingerprint import fingerprint
from vllm_deepinfer.checkpoint.options import TinyOptions
from vllm_deepinfer.checkpoint.tiny import write_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "original"
    return write_checkpoint(folder, TinyOptions(layers=4), shard_bytes=200_000).folder


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def rewritten(folder: Path, change: Callable[[dict[str, object]], None]) -> None:
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    change(fields)
    file.write_text(json.dumps(dict(reversed(fields.items()))))


def test_a_copy_is_the_same_model(original: Path, copy: Path) -> None:
    assert fingerprint(copy) == fingerprint(original) == fingerprint(str(original))
    assert len(fingerprint(copy)) == 64


def test_what_another_program_writes_does_not_count(original: Path, copy: Path) -> None:
    rewritten(copy, lambda fields: fields.update(transformers_version="9", _name_or_path="x"))
    (copy / "README.md").write_text("hello")
    assert fingerprint(copy) == fingerprint(original)


def test_a_field_of_the_config_counts(original: Path, copy: Path) -> None:
    rewritten(copy, lambda fields: fields.update(eos_token_id=2))
    assert fingerprint(copy) != fingerprint(original)


def test_the_tokenizer_counts(original: Path, copy: Path) -> None:
    file = copy / "tokenizer.json"
    file.write_text(file.read_text().replace("<｜User｜>", "<｜Uzer｜>"))
    assert fingerprint(copy) != fingerprint(original)
    file.unlink()
    assert fingerprint(copy) != fingerprint(original)


def test_weights_of_the_same_shapes_count(original: Path, tmp_path: Path) -> None:
    options = TinyOptions(layers=4, seed=1)
    other = write_checkpoint(tmp_path / "other", options, shard_bytes=200_000).folder
    assert {f.name for f in other.glob("*.safetensors")} == {f.name for f in original.glob("*.safetensors")}
    assert fingerprint(other) != fingerprint(original)


def test_a_missing_weight_file_counts(original: Path, copy: Path) -> None:
    next(copy.glob("*.safetensors")).unlink()
    assert fingerprint(copy) != fingerprint(original)


def test_what_cannot_be_read(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        fingerprint(tmp_path / "no")
    (copy / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is no JSON"):
        fingerprint(copy)


def test_an_odd_weight_file_does_not_raise(copy: Path) -> None:
    for content in (b"", b"abc", b"\xff" * 8):
        (copy / "odd.safetensors").write_bytes(content)
        fingerprint(copy)
