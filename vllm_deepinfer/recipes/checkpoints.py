"""The checkpoint folder of a recipe; a tiny one is written at its first use, the trained one is here."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from vllm_deepinfer.checkpoint.tiny import write_checkpoint
from vllm_deepinfer.checkpoint.trained import trained_folder
from vllm_deepinfer.recipes.errors import RecipeError
from vllm_deepinfer.recipes.facts import facts_at
from vllm_deepinfer.recipes.schema import Recipe

FORMAT = 1
"""Raise it when the same options make other bytes: older folders are then not used again."""


def cache_folder() -> Path:
    """Where tiny checkpoints are kept: $VLLM_DEEPINFER_CACHE, or the user's cache folder."""
    own = os.environ.get("VLLM_DEEPINFER_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "vllm-deepinfer"


def ensure_checkpoint(
    recipe: Recipe, cache: Path | None = None, progress: Callable[[int, int], None] = lambda done, total: None
) -> Path:
    """The recipe's checkpoint folder on this machine. A tiny one has a name of its own per set of options.

    Safe to call from several processes: the folder appears under its name when it is complete.

    Raises:
        RecipeError: There is no such checkpoint here.
        ConfigError, CheckpointError: The tiny one cannot be written; there is no trained one here.
    """
    if recipe.model.trained is not None:
        return trained_folder()
    options = recipe.model.tiny
    if options is None:
        facts = facts_at(recipe.model.path or "", "model.path")
        if facts.folder is None:
            raise RecipeError([facts.fault or f"{recipe.model.path} is not on this machine: download it."])
        return facts.folder
    digest = hashlib.sha256(f"{FORMAT} {options.model_dump_json()}".encode()).hexdigest()[:16]
    folder = (cache or cache_folder()) / f"tiny-{digest}"
    if (folder / "config.json").is_file():
        return folder
    try:
        return write_checkpoint(folder, options, progress=progress).folder
    except OSError:
        if (folder / "config.json").is_file():  # another process was faster
            return folder
        raise
