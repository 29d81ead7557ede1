"""Engram's hash is made from the engine's tokenizer, and a wrong one is one sentence."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from vllm_deepinfer_plugins.model.hashes import engram_hash

from vllm_deepinfer.checkpoint.config import V41Config
from vllm_deepinfer.checkpoint.engram import EngramHash
from vllm_deepinfer.errors import UserError

from .engines import FIXTURES, NAMES
from .samples import config_fields

FOLDER = FIXTURES / NAMES[0]


def model_config(folder: Path = FOLDER, tokenizer: Path | None = None, **text: Any) -> Any:
    """vLLM's model config as far as the hash needs it."""
    fields = config_fields()
    fields = fields | {"text_config": fields["text_config"] | text}
    hf = SimpleNamespace(to_dict=lambda: fields)
    name = None if tokenizer is None else str(tokenizer)
    return SimpleNamespace(hf_config=hf, model=str(folder), tokenizer=name, tokenizer_revision=None)


def sentence(config: Any) -> str:
    with pytest.raises(UserError) as error:
        engram_hash(config)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_hash_is_that_of_the_tokenizer_file() -> None:
    hashes = engram_hash(model_config())
    text = V41Config.from_dict(config_fields()).text_config
    wanted = EngramHash.build(text, Tokenizer.from_file(str(FOLDER / "tokenizer.json")))
    assert hashes is not None and (hashes.max_ngram, hashes.heads) == (3, 2)
    ids = np.arange(11, 60)
    assert np.array_equal(hashes.rows(ids), wanted.rows(ids))


def test_without_engram_no_tokenizer_is_looked_for(tmp_path: Path) -> None:
    config = model_config(tmp_path, engram_layer_ids=[], engram_num_embeddings=[])
    assert engram_hash(config) is None


def test_a_tokenizer_of_its_own_comes_first(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    assert engram_hash(model_config(Path("/nowhere"), tmp_path)) is not None


def test_no_tokenizer(tmp_path: Path) -> None:
    assert sentence(model_config(tmp_path)) == (
        f"{tmp_path} has no tokenizer.json, which Engram's token map is made from: add it"
    )


@pytest.mark.parametrize("data", [b"", b"{", b"{}", b"[]", b"\xff"])
def test_a_damaged_tokenizer(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    message = sentence(model_config(tmp_path))
    assert message.startswith(f"{tmp_path}/tokenizer.json is no tokenizer (")
    assert message.endswith("): download it again")


def test_a_tokenizer_that_compresses_to_another_size() -> None:
    message = sentence(model_config(engram_compressed_vocab_size=419))
    assert message.startswith(
        "text_config.engram_compressed_vocab_size is 419, but the tokenizer's ids compress"
    )
