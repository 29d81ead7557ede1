"""What can be known about a recipe's model without loading it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from vllm_deepinfer.checkpoint.config import V41Config
from vllm_deepinfer.checkpoint.kv_size import WeightBytes, encoding_of, weight_bytes
from vllm_deepinfer.checkpoint.options import TinyOptions
from vllm_deepinfer.checkpoint.trained import trained_folder
from vllm_deepinfer.errors import UserError
from vllm_deepinfer.recipes.schema import Model

RELEASED_ID = "deepseek-ai/DeepSeek-V4.1-Flash"


@dataclass(frozen=True)
class ModelFacts:
    """Attributes:
    config: None when it could not be found; then `fault` says why.
    folder: the checkpoint on this machine; None for a tiny one that is not written yet, or a Hugging Face id.
    fault: one sentence, or empty.
    """

    config: V41Config | None = None
    folder: Path | None = None
    fault: str = ""

    @property
    def weights(self) -> WeightBytes | None:
        """Stored sizes; None without a config."""
        return None if self.config is None else _sizes(self.config.model_dump_json())


@cache
def _sizes(config: str) -> WeightBytes:
    parsed = V41Config.from_dict(json.loads(config))
    return weight_bytes(parsed, encoding_of(parsed))


def model_facts(model: Model) -> ModelFacts:
    """Facts of the recipe's model. Never raises."""
    given = (model.path, model.trained, model.tiny)
    if sum(one is not None for one in given) != 1:
        return ModelFacts(fault="model needs one of path, trained and tiny: write one of them.")
    if model.trained is not None:
        return _trained_facts()
    if model.tiny is not None:
        return _tiny_facts(model.tiny)
    assert model.path is not None
    return facts_at(model.path, "model.path")


def facts_at(path: str, key: str) -> ModelFacts:
    """Facts of a folder or Hugging Face id that stands under `key` in the recipe. Never raises."""
    folder = Path(path)
    try:
        if not folder.is_dir():
            cached = huggingface_folder(path)
            if cached is None and path == RELEASED_ID:
                return ModelFacts(released_config())
            if cached is None:
                return ModelFacts(fault=_not_found(path, key))
            folder = cached
        return ModelFacts(V41Config.load(folder), folder)
    except UserError as error:
        return ModelFacts(fault=f"{key} is {path}: {error}.")
    except (OSError, ValueError):  # a name that no file system takes
        return ModelFacts(fault=_not_found(path, key))


def _not_found(path: str, key: str) -> str:
    return (
        f"{key} is {path}, which is no folder on this machine: download it and name its folder; without one, "
        f"only {RELEASED_ID} is known."
    )


def _trained_facts() -> ModelFacts:
    try:
        folder = trained_folder()
        return ModelFacts(V41Config.load(folder), folder)
    except UserError as error:
        return ModelFacts(fault=f"model.trained: {error}.")


@cache
def _tiny(options: str) -> V41Config:
    parsed = TinyOptions.model_validate_json(options)
    return V41Config.from_dict(parsed.build_config(parsed.build_tokenizer()))


def _tiny_facts(options: TinyOptions) -> ModelFacts:
    try:
        return ModelFacts(_tiny(options.model_dump_json()))
    except UserError as error:
        return ModelFacts(fault=f"model.tiny: {error}.")
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        return ModelFacts(fault=f"model.tiny describes no checkpoint ({error}): write smaller sizes.")


@cache
def released_config() -> V41Config:
    """config.json of DeepSeek-V4.1-Flash, as released."""
    text = (files(__package__) / "data" / "DeepSeek-V4.1-Flash.json").read_text(encoding="utf-8")
    return V41Config.from_dict(json.loads(text))


def huggingface_folder(model_id: str) -> Path | None:
    """Where Hugging Face's cache holds a model, if it does; no network."""
    home = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    repo = hub / f"models--{model_id.replace('/', '--')}"
    try:
        revision = (repo / "refs" / "main").read_text(encoding="utf-8").strip()
        folder = repo / "snapshots" / revision
        return folder if (folder / "config.json").is_file() else None
    except (OSError, ValueError):
        return None
