"""Several processes of one thread each that train together: rows shared out, gradients added up.

A step is some thousand small operations, and with threads each of them waits for the slowest thread;
processes wait for each other a few times in a step. Sums of two ranks do not depend on their order, so a
training with one or two processes gives the same weights every time.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist


def rank() -> int:
    """This process's number."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def share(rows: torch.Tensor) -> torch.Tensor:
    """This process's rows of a batch; all processes get equally many."""
    return rows[rank() :: world()].contiguous()


@torch.no_grad()
def add_up(tensors: Iterable[torch.Tensor]) -> None:
    """Replace each float32 tensor by the sum over all processes, in one exchange."""
    parts = list(tensors)
    if world() == 1 or not parts:
        return
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat)
    for part, whole in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.copy_(whole.view_as(part))
