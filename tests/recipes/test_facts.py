"""What is known of a model without loading it, and where a tiny one lies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.samples import config
from tests.recipes.samples import ALONE, recipe
from vllm_deepinfer.checkpoint import trained
from vllm_deepinfer.checkpoint.errors import CheckpointError
from vllm_deepinfer.checkpoint.fingerprint import fingerprint
from vllm_deepinfer.recipes import RecipeError
from vllm_deepinfer.recipes.checkpoints import cache_folder, ensure_checkpoint
from vllm_deepinfer.recipes.facts import (
    RELEASED_ID,
    facts_at,
    huggingface_folder,
    model_facts,
    released_config,
)


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)


def cached(folder: Path, model_id: str, fields: dict[str, Any]) -> Path:
    repo = folder / f"models--{model_id.replace('/', '--')}"
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc\n")
    (snapshot / "config.json").write_text(json.dumps(fields))
    return snapshot


def test_the_released_config_is_known_without_a_download() -> None:
    facts = facts_at(RELEASED_ID, "model.path")
    assert (facts.folder, facts.fault) == (None, "")
    assert facts.config == released_config()
    assert facts.config.text_config.num_hidden_layers == 40
    assert facts.weights is not None and round(facts.weights.total / 1e9) == 509


def test_hugging_face_s_cache_comes_first(tmp_path: Path) -> None:
    fields = config("released")
    fields["text_config"]["vocab_size"] = 129_281
    snapshot = cached(tmp_path / "hf" / "hub", RELEASED_ID, fields)
    assert huggingface_folder(RELEASED_ID) == snapshot
    facts = facts_at(RELEASED_ID, "model.path")
    assert facts.folder == snapshot
    assert facts.config is not None and facts.config.text_config.vocab_size == 129_281


def test_an_unfinished_download_is_none(tmp_path: Path) -> None:
    snapshot = cached(tmp_path / "hf" / "hub", "org/name", {})
    (snapshot / "config.json").unlink()
    assert huggingface_folder("org/name") is None
    assert huggingface_folder("a\0b") is None


def test_a_tiny_model_has_facts_before_it_is_written() -> None:
    facts = model_facts(recipe(ALONE, model={"tiny": {"layers": 4, "hidden": 96}}).model)
    assert facts.fault == "" and facts.folder is None
    assert facts.config is not None
    assert (facts.config.text_config.num_hidden_layers, facts.config.text_config.hidden_size) == (4, 96)


def test_a_tiny_checkpoint_is_written_once_and_named_by_its_options(tmp_path: Path) -> None:
    one = recipe(ALONE, model={"tiny": {"layers": 4}})
    seen: list[tuple[int, int]] = []
    folder = ensure_checkpoint(one, tmp_path, lambda done, total: seen.append((done, total)))
    assert folder.parent == tmp_path and (folder / "tokenizer.json").is_file()
    assert seen[-1][0] == seen[-1][1] > 0
    before = fingerprint(folder), (folder / "config.json").stat().st_mtime_ns
    again = ensure_checkpoint(recipe(ALONE, model={"tiny": {"layers": 4}}), tmp_path)
    assert again == folder
    assert (fingerprint(folder), (folder / "config.json").stat().st_mtime_ns) == before
    other = ensure_checkpoint(recipe(ALONE, model={"tiny": {"layers": 4, "seed": 1}}), tmp_path)
    assert other != folder and fingerprint(other) != before[0]


def test_a_real_checkpoint_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=f"{RELEASED_ID} is not on this machine: download it"):
        ensure_checkpoint(recipe(ALONE, model={"path": RELEASED_ID}))
    with pytest.raises(RecipeError, match="is no folder on this machine"):
        ensure_checkpoint(recipe(ALONE, model={"path": str(tmp_path / "no")}))
    written = ensure_checkpoint(recipe(ALONE), tmp_path)
    assert ensure_checkpoint(recipe(ALONE, model={"path": str(written)})) == written


def test_the_trained_one_is_used_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = ensure_checkpoint(recipe(ALONE), tmp_path)
    monkeypatch.setattr(trained, "FOLDER", written)
    asked = recipe(ALONE, model={"trained": {}})
    assert ensure_checkpoint(asked) == written
    facts = model_facts(asked.model)
    assert (facts.fault, facts.folder) == ("", written)
    assert facts.config is not None and facts.config.text_config.num_hidden_layers == 8
    monkeypatch.setattr(trained, "FOLDER", tmp_path / "no")
    with pytest.raises(CheckpointError, match="lacks the trained checkpoint"):
        ensure_checkpoint(asked)


def test_where_they_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/vllm-deepinfer")
    monkeypatch.setenv("VLLM_DEEPINFER_CACHE", "/own")
    assert cache_folder() == Path("/own")
