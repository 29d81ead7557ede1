"""One of two processes that train together: a module of its own, which a new process can import."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from vllm_deepinfer_plugins.train.backbone import BackboneTraining
from vllm_deepinfer_plugins.train.shape import build_backbone

from tests.plugins.train.tiny import FIELDS, SCHEDULE, TOKENIZER, run, weights


def train(folder: Path) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    training = BackboneTraining(build_backbone(FIELDS, TOKENIZER, 0), run(folder), SCHEDULE)
    training.run(lambda point: None)
    return weights(training.model)


def part(folder: Path, number: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=number, world_size=2)
    save_file(train(folder / "state"), folder / f"{number}.safetensors")
