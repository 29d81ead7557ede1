"""One thread unless a test asks for more; every test that takes ``kernels`` runs once per variant."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vllm_deepinfer_plugins.kernels import Kernels

os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.importorskip("torch")

from .variants import VARIANTS, compiled, threads


@pytest.fixture(scope="session", params=VARIANTS)
def kernels(request: Any) -> Kernels:
    return compiled(request.param)


@pytest.fixture(autouse=True)
def _as_in_the_engine() -> Iterator[None]:
    """One thread, no gradients, and whatever another test module has loaded is off."""
    import torch
    from vllm_deepinfer_plugins.kernels import suspended

    with threads(1), torch.no_grad(), suspended():
        yield
