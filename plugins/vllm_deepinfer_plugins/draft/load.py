"""The drafter's weights out of a checkpoint's ``mtp.*`` tensors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from vllm_deepinfer.checkpoint.config import ConfigError, TextConfig, V41Config
from vllm_deepinfer.checkpoint.layout import verify_headers

from ..model.weights import load_into, read_tensors
from .blocks import Drafter

PREFIX = "mtp."
OPTIONAL = "confidence_head.proj.weight"


def fill(drafter: Drafter, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Copy ``mtp.*`` tensors, others pass by; without a confidence head in them the drafter has none.

    Returns:
        Names of the parameters that were filled.

    Raises:
        ConfigError: A tensor is missing.
    """
    ours = [(name.removeprefix(PREFIX), tensor) for name, tensor in tensors if name.startswith(PREFIX)]
    filled = load_into(drafter.mtp, ours, drafter.dtype)
    missing = {name for name, _ in drafter.mtp.named_parameters()} - filled
    if any(name.endswith(OPTIONAL) for name in missing):
        drafter.mtp[-1].confidence_head = None
    missing = {name for name in missing if not name.endswith(OPTIONAL)}
    if missing:
        raise ConfigError(
            f"{PREFIX}{sorted(missing)[0]} is not in the checkpoint, so there is no drafter: leave "
            "--speculative-config out, or take a checkpoint with its DSpark blocks"
        )
    return {f"{PREFIX}{name}" for name in filled}


def check(config: TextConfig) -> None:
    """Raise ConfigError for a checkpoint without DSpark blocks."""
    if config.num_nextn_predict_layers < 1 or config.dspark_block_size < 1:
        raise ConfigError(
            "text_config.num_nextn_predict_layers is 0, so the checkpoint has no DSpark blocks to draft "
            "with: leave --speculative-config out, or take a checkpoint that has them"
        )


def load_drafter(folder: Path | str, dtype: torch.dtype = torch.float32) -> Drafter:
    """The drafter of a checkpoint folder, ready to run.

    Raises:
        ConfigError, CheckpointError: One sentence that names the field or tensor.
    """
    config = V41Config.load(Path(folder))
    check(config.text_config)
    verify_headers(Path(folder), config)
    drafter = Drafter(config.text_config, dtype)
    fill(drafter, read_tensors(folder))
    return drafter
