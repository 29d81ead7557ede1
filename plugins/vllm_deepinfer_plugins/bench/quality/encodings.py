"""The checkpoint with its weights re-encoded as released: FP8, MXFP4 and their scales."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from vllm_deepinfer.checkpoint.config import V41Config
from vllm_deepinfer.checkpoint.files import write_file
from vllm_deepinfer.checkpoint.options import QUANTIZATION, check_encodable
from vllm_deepinfer.checkpoint.tensors import entries
from vllm_deepinfer.checkpoint.verify import SINGLE
from vllm_deepinfer.checkpoint.weights import stored_arrays, stored_headers

from ...model.weights import decoded, read_tensors

COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def as_released(source: Path, target: Path) -> Path:
    """Write ``source`` in the released encoding.

    Raises:
        ConfigError: A width is no multiple of what a scale covers.
    """
    config = V41Config.load(source)
    check_encodable(config.text_config, "released")
    values = dict(decoded(read_tensors(source), torch.float32))
    shapes = dict(entries(config))
    headers = {
        stored: header
        for name, entry in shapes.items()
        for stored, header in stored_headers(name, entry, "released").items()
    }

    def arrays() -> Iterator[tuple[str, NDArray[Any]]]:
        for name, entry in shapes.items():
            yield from stored_arrays(name, entry, "released", values[name].float().numpy())

    target.mkdir(parents=True)
    write_file(target / SINGLE, headers, arrays())
    fields = json.loads((source / "config.json").read_text(encoding="utf-8"))
    fields |= {"dtype": "bfloat16", "quantization_config": QUANTIZATION}
    (target / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    for name in COPIED:
        if (source / name).is_file():
            shutil.copy(source / name, target / name)
    return target
