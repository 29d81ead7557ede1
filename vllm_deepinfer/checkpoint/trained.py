"""The small checkpoint that comes with the library and has learnt something."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import CheckpointError

FOLDER = Path(__file__).parent / "data" / "trained"
VARIABLE = "VLLM_DEEPINFER_TRAINED"
"""The environment variable that names another one, such as one that was trained just now."""
NAME = "tiny-v4.1"
"""What servers call it."""


def trained_folder() -> Path:
    """Where the trained checkpoint lies: $VLLM_DEEPINFER_TRAINED, or in this package.

    Raises:
        CheckpointError: This installation has none.
    """
    folder = Path(os.environ.get(VARIABLE) or FOLDER)
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} has no config.json, so this installation lacks the trained checkpoint: install it "
            "again, or use a tiny one with random weights"
        )
    return folder
