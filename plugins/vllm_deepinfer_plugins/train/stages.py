"""Both stages in order, and what they leave: the checkpoint, the figures and the charts."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from vllm_deepinfer.checkpoint.config import V41Config
from vllm_deepinfer.checkpoint.errors import CheckpointError
from vllm_deepinfer.checkpoint.tokenizer import PAD, tokenizer_of
from vllm_deepinfer.lessons.stream import MIX, Document, DocumentKind, documents
from vllm_deepinfer.lessons.vocabulary import tokenizer

from ..draft.load import check
from ..model.backbone import Backbone
from ..model.weights import load_backbone
from .backbone import BackboneTraining
from .chart import svg
from .drafter import DrafterTraining
from .export import export, round_as_stored
from .loop import Report, Run, Training
from .ranks import rank, world
from .schedule import Schedule
from .shape import OPTIONS, build_backbone, build_drafter, config_fields

LATER: Mapping[DocumentKind, float] = {
    "code": 0.40,
    "prose": 0.07,
    "tools": 0.14,
    "json": 0.05,
    "recall": 0.05,
    "retrieval": 0.15,
    "copy": 0.06,
    "arithmetic": 0.05,
    "reasoning": 0.01,
    "chat": 0.02,
}
"""Shares of tokens in the second half: by then lessons of a few templates have under 0.5 bits per token."""
DRAFTED: Mapping[DocumentKind, float] = {
    "code": 0.45,
    "prose": 0.06,
    "tools": 0.18,
    "json": 0.10,
    "recall": 0.01,
    "retrieval": 0.03,
    "copy": 0.03,
    "arithmetic": 0.06,
    "reasoning": 0.02,
    "chat": 0.06,
}
"""Shares of tokens for the drafter: code takes longest, and most else that it is asked for is structured."""
_OTHER_TEXTS = 7919
"""Added to the seed for the drafter: it learns on documents that the backbone has not seen."""
STEPS = 2400
"""Of the backbone."""
CHECKPOINT, FIGURES = "checkpoint", "figures.json"
_CHARTS = {"backbone": ("bits", "bits per token"), "drafter": ("length", "tokens of a round, bonus included")}

StageReport = Callable[[str, int, dict[str, float]], None]
"""Takes the stage's name, its steps in all, and a point of its curve."""


@dataclass(frozen=True)
class Order:
    """What is to be trained.

    Attributes:
        out: The folder of states and results.
        steps: Of the backbone. draft_steps: of the drafter.
        dtype: What activations and products have.
        backbone: A checkpoint folder whose backbone gets a drafter; none is trained then.
    """

    out: Path
    seed: int = 0
    steps: int = STEPS
    draft_steps: int = 1600
    save_every: float = 180.0
    dtype: torch.dtype = torch.bfloat16
    backbone: Path | None = None


def train(order: Order, report: StageReport) -> Path:
    """Train, or go on with what is in the folder; only rank 0 writes.

    Returns:
        The checkpoint's folder.

    Raises:
        ConfigError, CheckpointError: The folder's state is of another training, or the given backbone is of
            no use.
        NotFiniteError: The loss is no number.
    """
    words = tokenizer()
    if order.backbone is None:
        fields = config_fields(words, OPTIONS)
        lessons = partial(taught, words, order.steps // 2)
        run = Run(order.out, lessons, order.seed, PAD, order.dtype, order.save_every)
        backbone = build_backbone(fields, words, order.seed)
        first = BackboneTraining(backbone, run, Schedule(order.steps))
        first.run(_of(report, first))
        round_as_stored(backbone, fields)
        figures = {first.NAME: figures_of(first)}
        _chart(order, first)
    else:
        fields, backbone = given(order.backbone, words)
        figures = _figures_beside(order.backbone)
    seed, source = order.seed + _OTHER_TEXTS, partial(drafted, words)
    run = Run(order.out, source, seed, PAD, order.dtype, order.save_every)
    drafter = build_drafter(fields, order.seed)
    second = DrafterTraining(drafter, backbone, run, draft_schedule(order.draft_steps))
    second.run(_of(report, second))
    folder = order.out / CHECKPOINT
    if rank() == 0:
        size = export(folder, fields, words, backbone, drafter)
        write_figures(folder, figures | {second.NAME: figures_of(second)}, size)
    _chart(order, second)
    return folder


def quickest_dtype() -> torch.dtype:
    """Of activations and products: float32 on a CPU that emulates those in bfloat16 (x86 without AVX-512)."""
    quick = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if quick else torch.float32


def given(folder: Path, words: Tokenizer) -> tuple[dict[str, Any], Backbone]:
    """Fields and backbone of a checkpoint folder that is to get a drafter.

    Raises:
        ConfigError, CheckpointError: It cannot be read, announces no drafter, or has other tokens.
    """
    config = V41Config.load(folder)
    check(config.text_config)
    backbone = load_backbone(folder)
    if tokenizer_of(folder).get_vocab() != words.get_vocab():
        raise CheckpointError(
            f"{folder}/tokenizer.json has other tokens than the lessons: name a folder that this command made"
        )
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    round_as_stored(backbone, fields)
    return fields, backbone


def taught(words: Tokenizer, later: int, seed: int, step: int) -> Iterator[Document]:
    """Documents of a step: `MIX`, and from the step ``later`` on more of what takes longest to learn."""
    return documents(seed, "train", words, MIX if step < later else LATER)


def drafted(words: Tokenizer, seed: int, step: int) -> Iterator[Document]:
    """Documents of the drafter's steps, the same mix throughout."""
    return documents(seed, "train", words, DRAFTED)


def draft_schedule(steps: int) -> Schedule:
    """Rows of 512 with the selection in force throughout."""
    return Schedule(steps, lengths=((0.0, 512),), sparse=0.0)


def figures_of(stage: Training) -> dict[str, Any]:
    """How a stage's weights came about: settings, wall time, machine, curve."""
    return {
        "settings": stage.settings,
        "steps": stage.step,
        "tokens": stage.step * stage.schedule.tokens,
        "seconds": round(stage.seconds, 1),
        "parameters": sum(value.numel() for value in stage.model.parameters()),
        "machine": {
            "cores": os.cpu_count(),
            "processes": world(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "curve": [{name: _short(value) for name, value in point.items()} for point in stage.curve],
    }


def write_figures(folder: Path, stages: Mapping[str, Any], weight_bytes: int) -> None:
    """How the weights came about, beside them: the stages by name."""
    text = json.dumps({"training": {**stages, "weight_bytes": weight_bytes}}, indent=1) + "\n"
    (folder / FIGURES).write_text(text, encoding="utf-8")


def _figures_beside(folder: Path) -> dict[str, Any]:
    """What a folder's figures say of its backbone, if it has any."""
    try:
        found = json.loads((folder / FIGURES).read_text(encoding="utf-8"))["training"]
        return {BackboneTraining.NAME: found[BackboneTraining.NAME]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _chart(order: Order, stage: Training) -> None:
    if rank() == 0:
        name, axis = _CHARTS[stage.NAME]
        points = [(point["step"], point[name]) for point in stage.curve]
        chart = svg(f"{stage.NAME}, seed {order.seed}", points, x="step", y=axis)
        (order.out / f"{stage.NAME}.svg").write_text(chart, encoding="utf-8")


def _short(value: float) -> float:
    return value if isinstance(value, int) else round(value, 4)


def _of(report: StageReport, stage: Training) -> Report:
    return lambda point: report(stage.NAME, stage.schedule.steps, point)
