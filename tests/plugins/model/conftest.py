"""One thread: at these sizes a second one costs more in barriers than it computes."""

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
