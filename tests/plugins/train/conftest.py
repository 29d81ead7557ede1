"""Every test of training runs as the command does: one thread, PyTorch's deterministic operations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.utils.deterministic


@pytest.fixture(autouse=True)
def as_the_command_runs() -> Iterator[None]:
    threads, exact = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(exact)
    torch.utils.deterministic.fill_uninitialized_memory = filled
