"""A model and a source of documents small enough that a training takes a second."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import torch
from vllm_deepinfer_plugins.draft.blocks import Drafter
from vllm_deepinfer_plugins.model.backbone import Backbone
from vllm_deepinfer_plugins.train.loop import Run
from vllm_deepinfer_plugins.train.schedule import Schedule
from vllm_deepinfer_plugins.train.shape import build_backbone, build_drafter, config_fields

from vllm_deepinfer.checkpoint.options import TinyOptions
from vllm_deepinfer.lessons.stream import Document

M = TypeVar("M", bound=torch.nn.Module)
OPTIONS = TinyOptions(
    hidden=32,
    heads=2,
    head_dim=32,
    experts=4,
    expert_width=32,
    window=16,
    vocab=512,
    dspark_blocks=3,
    encoding="bf16",
    overrides={"index_topk": 8, "index_head_dim": 32, "hc_sinkhorn_iters": 3, "engram_vocab_size": 50},
)
TOKENIZER = OPTIONS.build_tokenizer()
FIELDS = config_fields(TOKENIZER, OPTIONS)
SCHEDULE = Schedule(12, tokens=128, lengths=((0.0, 32), (0.5, 64)), sparse=0.25)


def backbone(seed: int = 0) -> Backbone:
    """One that has learnt nothing, with sub-layers that do something."""
    return stirred(build_backbone(FIELDS, TOKENIZER, seed), seed)


def drafter(seed: int = 0) -> Drafter:
    return stirred(build_drafter(FIELDS, seed), seed)


def stirred(model: M, seed: int) -> M:
    """Noise on every parameter, so that none has its neutral value."""
    generator = torch.Generator().manual_seed(seed + 99)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn(value.shape, generator=generator), alpha=0.1)
    return model


def source(seed: int, step: int = 0) -> Iterator[Document]:
    """Counting sentences of a few lengths: something that can be learnt at once."""
    draw = random.Random(seed)
    while True:
        first = draw.randrange(100, 200)
        tokens = [0, *range(first, first + draw.randrange(8, 40))]
        yield Document(tokens, [False] + [True] * (len(tokens) - 1), draw.choice(["code", "chat"]))


def run(folder: Path, seed: int = 0) -> Run:
    return Run(folder, source, seed, dtype=torch.float32)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
