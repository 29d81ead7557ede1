from __future__ import annotations

import hashlib
import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from vllm_deepinfer.checkpoint import tiny
from vllm_deepinfer.checkpoint.config import V41Config
from vllm_deepinfer.checkpoint.engram import EngramHash
from vllm_deepinfer.checkpoint.errors import CheckpointError, ConfigError
from vllm_deepinfer.checkpoint.files import read_headers
from vllm_deepinfer.checkpoint.layout import ENCODINGS, Encoding
from vllm_deepinfer.checkpoint.options import TinyOptions
from vllm_deepinfer.checkpoint.tensors import entries
from vllm_deepinfer.checkpoint.tiny import write_checkpoint
from vllm_deepinfer.checkpoint.verify import INDEX, verify_headers
from vllm_deepinfer.checkpoint.weights import random_values

from .samples import sentence

SMALL: dict[str, Any] = {
    "layers": 4,
    "hidden": 32,
    "experts": 2,
    "top_k": 1,
    "expert_width": 32,
    "vocab": 300,
}
FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", INDEX}


def write(out: Path, *, force: bool = False, shard_bytes: int = 1 << 30, **changes: Any) -> tiny.Written:
    return write_checkpoint(out, TinyOptions(**{**SMALL, **changes}), force=force, shard_bytes=shard_bytes)


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def refused(out: Path, **changes: Any) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        write(out, **changes)
    return sentence(caught.value)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("blocks", [0, 3])
def test_a_written_checkpoint_is_faultless(tmp_path: Path, encoding: Encoding, blocks: int) -> None:
    out = tmp_path / "model"
    write(out, encoding=encoding, dspark_blocks=blocks)
    config = V41Config.load(out)
    verify_headers(out, config)
    assert config.text_config.num_nextn_predict_layers == blocks
    EngramHash.build(config.text_config, Tokenizer.from_file(str(out / "tokenizer.json")))
    assert {file.name for file in out.iterdir()} == FILES | {"model-00001-of-00001.safetensors"}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_same_options_give_the_same_bytes(tmp_path: Path, encoding: Encoding) -> None:
    for name in ("first", "second"):
        write(tmp_path / name, encoding=encoding)
    assert digests(tmp_path / "first") == digests(tmp_path / "second")


def test_another_seed_changes_the_weights_alone(tmp_path: Path) -> None:
    write(tmp_path / "first", seed=0)
    write(tmp_path / "second", seed=1)
    first, second = digests(tmp_path / "first"), digests(tmp_path / "second")
    assert {name for name in first if first[name] != second[name]} == {"model-00001-of-00001.safetensors"}


def test_the_weights_are_the_random_ones(tmp_path: Path) -> None:
    write(tmp_path / "model", seed=3)
    config = V41Config.load(tmp_path / "model")
    with safe_open(tmp_path / "model" / "model-00001-of-00001.safetensors", framework="np") as file:
        for name, entry in entries(config):
            assert np.array_equal(file.get_tensor(name), random_values(name, entry, 3)), name


def test_the_default_checkpoint() -> None:
    """What `make serve` writes: its size is part of the README."""
    config = V41Config.from_dict(TinyOptions().build_config(TinyOptions().build_tokenizer()))
    parameters = sum(int(np.prod(entry.shape)) for _, entry in entries(config))
    assert parameters == 1_084_432


@pytest.mark.parametrize("limit", [1, 10_000, 100_000])
def test_several_weight_files(tmp_path: Path, limit: int) -> None:
    out = tmp_path / "model"
    written = write(out, shard_bytes=limit, encoding="released")
    files = sorted(out.glob("*.safetensors"))
    assert len(files) == written.shards > 1
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    verify_headers(out, V41Config.load(out))
    for file in files:
        headers = read_headers(file)
        groups = {name.removesuffix(".weight").removesuffix(".scale") for name in headers}
        assert sum(header.nbytes for header in headers.values()) <= limit or len(groups) == 1
        for name in headers:  # a scale is never apart from its weight
            if name.endswith(".scale"):
                assert name.removesuffix(".scale") + ".weight" in headers


def test_cutting_into_files_does_not_change_the_weights(tmp_path: Path) -> None:
    write(tmp_path / "one")
    write(tmp_path / "many", shard_bytes=20_000)
    with safe_open(tmp_path / "one" / "model-00001-of-00001.safetensors", framework="np") as whole:
        for file in (tmp_path / "many").glob("*.safetensors"):
            with safe_open(file, framework="np") as part:
                for name in part.keys():  # noqa: SIM118 (not a dict)
                    assert np.array_equal(part.get_tensor(name), whole.get_tensor(name))


def test_the_index(tmp_path: Path) -> None:
    out = tmp_path / "model"
    written = write(out, shard_bytes=50_000)
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"] == {"total_size": written.weight_bytes}
    assert list(index["weight_map"]) == sorted(index["weight_map"])
    assert len(index["weight_map"]) == written.tensors


def test_what_is_reported(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    written = write_checkpoint(
        tmp_path / "model", TinyOptions(**SMALL), progress=lambda done, total: seen.append((done, total))
    )
    config = V41Config.load(tmp_path / "model")
    assert written.parameters == sum(int(np.prod(entry.shape)) for _, entry in entries(config))
    assert written.weight_bytes == 4 * written.parameters
    assert seen[-1] == (written.weight_bytes, written.weight_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) == written.tensors


def test_generation_defaults(tmp_path: Path) -> None:
    write(tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert (settings["bos_token_id"], settings["eos_token_id"], settings["temperature"]) == (0, 1, 1.0)


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write(tmp_path / "model")
    assert {file.name for file in (tmp_path / "model").iterdir()} >= FILES


@pytest.mark.parametrize("there", ["nothing", "a folder", "a checkpoint"])
def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path, there: str) -> None:
    real, link = tmp_path / "disk" / "real", tmp_path / "link"
    link.symlink_to(real)
    if there == "a folder":
        real.mkdir(parents=True)
    elif there == "a checkpoint":
        write(real, seed=9)
    written = write(link, force=there == "a checkpoint")
    assert written.folder == real
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]
    assert [path.name for path in real.parent.iterdir()] == ["real"]
    verify_headers(link, V41Config.load(link))


def test_parents_are_created(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b" / "model")
    verify_headers(tmp_path / "a" / "b" / "model", V41Config.load(tmp_path / "a" / "b" / "model"))


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    assert refused(tmp_path).startswith(f"{tmp_path} is not empty: name a new folder, or add --force")
    assert [file.name for file in tmp_path.iterdir()] == ["note.txt"]


def test_force_replaces_a_checkpoint_whole(tmp_path: Path) -> None:
    out = tmp_path / "model"
    write(out, seed=0, shard_bytes=20_000)
    write(out, seed=1, force=True)
    write(tmp_path / "fresh", seed=1)
    assert digests(out) == digests(tmp_path / "fresh")
    assert {file.name for file in tmp_path.iterdir()} == {"model", "fresh"}


@pytest.mark.parametrize("config", [None, "{", "[]", '{"model_type": "qwen3"}'])
def test_force_deletes_nothing_else(tmp_path: Path, config: str | None) -> None:
    (tmp_path / "note.txt").write_text("mine")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert "holds no DeepSeek-V4.1 checkpoint, so --force would delete something else: " in refused(
        tmp_path, force=True
    )
    assert (tmp_path / "note.txt").read_text() == "mine"


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("x")
    assert refused(tmp_path / "model", force=True).startswith(
        f"{tmp_path / 'model'} is a file: name a new folder"
    )


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 90, 10))
    message = refused(tmp_path / "model")
    assert message.startswith(f"{tmp_path} has 10 bytes free, but the weights take ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError])
@pytest.mark.parametrize("force", [False, True])
def test_an_interruption_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], force: bool
) -> None:
    out = tmp_path / "model"
    if force:
        write(out, seed=0)
    before = digests(out) if force else None

    def fail_at_the_end(name: str, *rest: Any) -> Any:
        if name == "head.weight":
            raise error
        return random_values(name, *rest)

    monkeypatch.setattr(tiny, "random_values", fail_at_the_end)
    with pytest.raises(error):
        write(out, seed=1, force=force)
    assert [file.name for file in tmp_path.iterdir()] == (["model"] if force else [])
    assert (digests(out) if force else None) == before


def test_a_failing_rename_brings_the_old_checkpoint_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "model"
    write(out, seed=0)
    before = digests(out)
    rename = Path.rename

    def refuse_partial(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise PermissionError(13, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_partial)
    with pytest.raises(PermissionError):
        write(out, seed=1, force=True)
    assert digests(out) == before
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_refused_options_touch_nothing(tmp_path: Path) -> None:
    assert refused(tmp_path / "model", top_k=3).startswith("text_config.num_experts_per_tok is 3: ")
    assert not list(tmp_path.iterdir())
