"""Trained modules as a checkpoint folder in the released layout, through the library's own writer."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from vllm_deepinfer.checkpoint.config import V41Config
from vllm_deepinfer.checkpoint.files import Header, write_file
from vllm_deepinfer.checkpoint.layout import Encoding
from vllm_deepinfer.checkpoint.tensors import entries
from vllm_deepinfer.checkpoint.tiny import GENERATION
from vllm_deepinfer.checkpoint.tokenizer import tokenizer_files
from vllm_deepinfer.checkpoint.verify import SINGLE, verify_headers
from vllm_deepinfer.checkpoint.weights import stored_arrays, stored_headers

from ..draft.blocks import Drafter
from ..draft.load import PREFIX
from ..model.backbone import Backbone

_EXPERT = re.compile(r"(.*\.ffn\.experts)\.(\d+)\.w([123])\.weight")
_HYPER = re.compile(r"(.*\.hc_(?:attn|ffn))_(fn|base|scale)")


def export(
    folder: Path,
    fields: dict[str, Any],
    tokenizer: Tokenizer,
    backbone: Backbone,
    drafter: Drafter | None,
    encoding: Encoding = "bf16",
) -> int:
    """Write a checkpoint folder; an older one of that name is replaced when the new one is complete.

    Args:
        fields: The config.json. Without a drafter it must announce no blocks.

    Returns:
        Bytes of weights.

    Raises:
        CheckpointError: The tensors are not those that the config implies.
    """
    config = V41Config.from_dict(fields)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    length = config.text_config.max_position_embeddings
    texts = tokenizer_files(tokenizer, context_length=length)
    texts |= {"config.json": _json(fields), "generation_config.json": _json(GENERATION)}
    for name, text in texts.items():
        (partial / name).write_text(text, encoding="utf-8", newline="\n")
    headers: dict[str, Header] = {}
    for name, entry in entries(config):
        headers |= stored_headers(name, entry, encoding)
    write_file(partial / SINGLE, headers, _arrays(config, backbone, drafter, encoding))
    verify_headers(partial, config)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return sum(header.nbytes for header in headers.values())


@torch.no_grad()
def round_as_stored(backbone: Backbone, fields: dict[str, Any], encoding: Encoding = "bf16") -> None:
    """Give a backbone the values that `export` would write and a loader read again, in place.

    A drafter that learns behind such a backbone learns with the target that it will have, and gets the same
    weights whether the backbone was trained just now or comes from a folder.
    """
    config = V41Config.from_dict(fields)
    found = dict(backbone.named_parameters())
    for name, entry in entries(config):
        if not name.startswith(PREFIX) and stored_headers(name, entry, encoding)[name].dtype == "BF16":
            value = _value(name, found)
            value.copy_(value.bfloat16())


def _arrays(
    config: V41Config, backbone: Backbone, drafter: Drafter | None, encoding: Encoding
) -> Iterator[tuple[str, NDArray[Any]]]:
    found = dict(backbone.named_parameters())
    found |= {} if drafter is None else dict(drafter.named_parameters())
    for name, entry in entries(config):
        values = _value(name, found).detach().float().numpy()
        yield from stored_arrays(name, entry, encoding, np.ascontiguousarray(values))


def _value(name: str, found: dict[str, torch.nn.Parameter]) -> torch.Tensor:
    """The part of a module's parameter that a released tensor is; the other way round: `model.weights`."""
    if match := _EXPERT.fullmatch(name):
        stack, expert, matrix = match[1], int(match[2]), match[3]
        if matrix == "2":
            return found[f"{stack}.down"][expert]
        gate, up = found[f"{stack}.gate_up"][expert].chunk(2)
        return gate if matrix == "1" else up
    if match := _HYPER.fullmatch(name):
        return found[f"{match[1]}.{match[2]}"]
    return found[name]


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
