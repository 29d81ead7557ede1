"""A training's state on disk: one safetensors file, replaced as a whole, with the counters in its header."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from vllm_deepinfer.checkpoint.errors import CheckpointError

from .optimizer import Optimizer

_HEADER = "deepinfer"


@dataclass(frozen=True)
class Saved:
    """What a file holds besides the tensors: the step that comes next, the settings, the curve so far."""

    step: int
    settings: dict[str, Any]
    curve: list[dict[str, float]]
    seconds: float


def save(file: Path, model: nn.Module, optimizer: Optimizer, saved: Saved) -> None:
    """Write the state beside ``file`` and move it there; a kill at any moment leaves the last whole one."""
    tensors = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    tensors |= {f"optimizer.{name}": value for name, value in optimizer.state.items()}
    partial = file.with_name(f".{file.name}.partial")
    header = {"steps": optimizer.steps, **saved.__dict__}
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, partial, {_HEADER: json.dumps(header)}
    )
    with partial.open("rb") as written:
        os.fsync(written.fileno())
    os.replace(partial, file)


def read_header(file: Path) -> Saved:
    """The counters of a state file.

    Raises:
        CheckpointError: It is no state of a training.
    """
    try:
        with safe_open(file, framework="pt") as handle:
            header = json.loads((handle.metadata() or {})[_HEADER])
        return Saved(**{name: header[name] for name in Saved.__dataclass_fields__})
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{file} is no state of a training ({type(error).__name__}): name another folder, or delete the "
            "file to begin anew"
        ) from None


def restore(
    file: Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    settings: dict[str, Any] | None = None,
) -> Saved:
    """Fill model and optimiser from a state file of the same shape.

    Args:
        settings: Those that the training goes on with; they must be those that it was begun with.

    Raises:
        CheckpointError: It belongs to another model, or to a training with other settings.
    """
    saved = read_header(file)
    if settings is not None and saved.settings != settings:
        raise CheckpointError(
            f"{file} was begun with other settings ({json.dumps(saved.settings)}): give the same ones, or "
            "name another folder"
        )
    with safe_open(file, framework="pt") as handle, torch.no_grad():
        names = set(handle.keys())
        places = {f"model.{name}": value for name, value in model.named_parameters()}
        if optimizer is not None:
            places |= {f"optimizer.{name}": value for name, value in optimizer.state.items()}
            optimizer.steps = json.loads(handle.metadata()[_HEADER])["steps"]
        for name, place in places.items():
            if name not in names or list(handle.get_slice(name).get_shape()) != list(place.shape):
                raise CheckpointError(f"{file} holds another model ({name} differs): name another folder")
            place.copy_(handle.get_tensor(name))
    return saved
