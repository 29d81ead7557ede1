"""Each backend passes the conformance suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_deepinfer.store.base import Backend
from vllm_deepinfer.store.conformance import CHECKS, Check
from vllm_deepinfer.store.directory import DirectoryBackend
from vllm_deepinfer.store.memory import MemoryBackend

MAKERS: dict[str, Callable[[Path], Backend]] = {
    "directory": DirectoryBackend,
    "directory-direct": lambda path: DirectoryBackend(path, direct=True),
    "directory-unsynced": lambda path: DirectoryBackend(path, sync=False),
    "memory": lambda path: MemoryBackend(path, 512 << 20),
}


@pytest.fixture(params=MAKERS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    made = MAKERS[request.param](tmp_path / "store")
    yield made
    made.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(backend: Backend, check: Check) -> None:
    check(backend)
