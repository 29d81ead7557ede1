"""Released weights into the modules: names, stacked experts, and the released number formats decoded.

Dense projections are FP8 E4M3 with one power-of-two scale per 32 × 32 block, Engram rows FP8 with one per row
and 32 columns, routed experts MXFP4 (E2M1, two to a byte, even column low) with one per row and 32 columns.
All of them fit into bfloat16 without loss, so a decoded weight is the same in either dtype.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from vllm_deepinfer.checkpoint.config import V41Config
from vllm_deepinfer.checkpoint.engram import EngramHash
from vllm_deepinfer.checkpoint.layout import verify_headers
from vllm_deepinfer.checkpoint.tokenizer import tokenizer_of
from vllm_deepinfer.checkpoint.verify import INDEX, SINGLE

from .backbone import Backbone

_EXPERT = re.compile(r"(.*\.ffn\.experts)\.(\d+)\.w([123])\.weight")
_HYPER = re.compile(r"(.*\.hc_(?:attn|ffn))_(fn|base|scale)")
_NOT_BACKBONE = ("mtp.", "vision.", "aligner.", "image_start", "image_end", "image_newline")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BLOCK = 32


def dequantize(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decode one released weight.

    Args:
        weight: FP8 E4M3 [rows, columns], or int8 [rows, columns / 2] with two E2M1 codes in a byte.
        scale: E8M0 [⌈rows / 32⌉ or rows, ⌈columns / 32⌉]; as many rows as the weight means one scale per row.

    Returns:
        [rows, columns] in ``dtype``.
    """
    values = _unpack_e2m1(weight) if weight.dtype in (torch.int8, torch.uint8) else weight.float()
    rows, columns = values.shape
    wide = scale.float().repeat_interleave(_BLOCK, dim=1)[:, :columns]
    if len(scale) != rows:
        wide = wide.repeat_interleave(_BLOCK, dim=0)[:rows]
    return (values * wide).to(dtype)


def _unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    codes = packed.view(torch.uint8).long()
    table = torch.tensor(_E2M1, device=packed.device)
    return torch.stack((table[codes & 15], table[codes >> 4]), dim=-1).flatten(1)


def decoded(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pair quantised weights with their scales, wherever those come in the stream, and decode them.

    Args:
        tensors: Released names and tensors in any order.
        dtype: What decoded weights become; unquantised ones pass as they are.

    Raises:
        ValueError: A weight came without its scale or the other way round.
    """
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        stem, _, kind = name.rpartition(".")
        quantised = tensor.dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8)
        if kind == "scale" and not _HYPER.fullmatch(name):
            other = stem + ".weight"
        elif quantised:
            other = stem + ".scale"
        else:
            yield name, tensor
            continue
        if other not in waiting:
            waiting[name] = tensor
        elif kind == "scale":
            yield other, dequantize(waiting.pop(other), tensor, dtype)
        else:
            yield name, dequantize(tensor, waiting.pop(other), dtype)
    if waiting:
        name = sorted(waiting)[0]
        raise ValueError(
            f"{name} has no partner: a quantised weight and its scale must both be in the checkpoint"
        )


def load_into(model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> set[str]:
    """Copy released tensors into a module that uses the released names; drafter and vision tensors pass by.

    Returns:
        Names of the parameters that were filled, for a check that none was forgotten.
    """
    parameters = dict(model.named_parameters())
    filled: set[str] = set()
    backbone = ((name, tensor) for name, tensor in tensors if not name.startswith(_NOT_BACKBONE))
    for name, tensor in decoded(backbone, dtype):
        target, part = _target(name, parameters)
        if target not in parameters or (part and part[0] >= len(parameters[target])):
            raise ValueError(f"{name} belongs to no parameter of this model: config.json and weights differ")
        place = parameters[target].data if part is None else parameters[target].data[part]
        if place.shape != tensor.shape:
            raise ValueError(
                f"{name} has the shape {list(tensor.shape)}, but config.json implies {list(place.shape)}"
            )
        place.copy_(tensor)
        filled.add(target)
    return filled


def _target(name: str, parameters: dict[str, nn.Parameter]) -> tuple[str, tuple[int, slice] | None]:
    """Name of the parameter that a released tensor goes into, and for experts its part of the stack."""
    if match := _EXPERT.fullmatch(name):
        stack, expert, matrix = match[1], int(match[2]), match[3]
        if matrix == "2":
            return f"{stack}.down", (expert, slice(None))
        width = parameters[f"{stack}.gate_up"].shape[1] // 2 if f"{stack}.gate_up" in parameters else 0
        return f"{stack}.gate_up", (expert, slice(0, width) if matrix == "1" else slice(width, 2 * width))
    if match := _HYPER.fullmatch(name):
        return f"{match[1]}.{match[2]}", None
    return name, None


def read_tensors(folder: Path | str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint folder under its released name."""
    index = Path(folder) / INDEX
    files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [SINGLE]
    for file in files:
        with safe_open(Path(folder) / file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 (the handle is no mapping)
                yield name, handle.get_tensor(name)


def load_backbone(folder: Path | str, dtype: torch.dtype = torch.float32) -> Backbone:
    """The plain form of a checkpoint folder, ready to run.

    Raises:
        ConfigError, CheckpointError: One sentence that names the field or tensor, before any weight is read.
    """
    folder = Path(folder)
    config = V41Config.load(folder)
    verify_headers(folder, config)
    hashes = None
    if config.text_config.engram_layer_ids:
        hashes = EngramHash.build(config.text_config, tokenizer_of(folder))
    model = Backbone(config.text_config, hashes, dtype)
    missing = {name for name, _ in model.named_parameters()} - load_into(model, read_tensors(folder), dtype)
    assert not missing, f"verify_headers let {sorted(missing)} pass"
    return model
