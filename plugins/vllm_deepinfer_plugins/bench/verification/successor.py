"""A checkpoint of random weights that writes the next id, whatever its layers say.

Embeddings outweigh what the layers add to them, and the head's row of a token is the embedding of the token
before it. So the greedy answer to every prompt is known, to any length and on every machine, while the layers
compute, select and route as they would: a scripted drafter can be right as often as its script says.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vllm_deepinfer.checkpoint.options import TinyOptions
from vllm_deepinfer.checkpoint.tiny import write_checkpoint

FIRST = 512
"""Lowest ordinary token: below are control tokens, and bytes that Engram's normalisation may merge."""
LOUD = 64.0  # deviation of the embeddings; what a layer adds is near 1


def successor(token: int, vocabulary: int) -> int:
    """The ordinary token that follows one."""
    return FIRST + (token - FIRST + 1) % (vocabulary - FIRST)


def write_successor(folder: Path, options: TinyOptions) -> Path:
    """Write the checkpoint, unquantised, in one file."""
    path = write_checkpoint(folder, options).folder
    [file] = path.glob("*.safetensors")
    tensors = load_file(file)
    embed, head = (next(n for n in tensors if n.endswith(name)) for name in ("embed.weight", "head.weight"))
    rows = tensors[embed].float()
    tokens = torch.arange(FIRST, len(rows))
    followers = FIRST + (tokens - FIRST + 1) % (len(rows) - FIRST)
    answers = torch.zeros_like(rows)
    answers[followers] = rows[tokens] / rows.shape[1] ** 0.5
    tensors[head] = answers.to(tensors[head].dtype)
    tensors[embed] = (LOUD * rows).to(tensors[embed].dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    return path
