"""One thread, since at these sizes a second one costs more in barriers; no native kernels by default."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    import torch  # where another test module has imported it already, the variable came too late

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def portable() -> Iterator[None]:
    """Native kernels are on in a test only if it loads them, and off again behind it."""
    from vllm_deepinfer_plugins.kernels import suspended

    with suspended():
        yield
