"""Each backend passes the conformance suite."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.store.s3_server import BUCKET, CREDENTIALS, s3_server
from vllm_deepinfer.store.base import Backend
from vllm_deepinfer.store.conformance import CHECKS, Check
from vllm_deepinfer.store.directory import DirectoryBackend
from vllm_deepinfer.store.memory import MemoryBackend
from vllm_deepinfer.store.tiered import TieredBackend
from vllm_deepinfer.store.uri import open_store

MAKERS: dict[str, Callable[[Path], Backend]] = {
    "tiered": lambda path: TieredBackend(
        [MemoryBackend(path / "m", 512 << 20), DirectoryBackend(path / "d")]
    ),
    "directory": DirectoryBackend,
    "directory-direct": lambda path: DirectoryBackend(path, direct=True),
    "directory-unsynced": lambda path: DirectoryBackend(path, sync=False),
    "memory": lambda path: MemoryBackend(path, 512 << 20),
}


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    pytest.importorskip("obstore", reason="the extra s3 is not installed")
    pytest.importorskip("moto", reason="moto, the S3 server of the tests, is not installed")
    with s3_server() as address:
        yield address


@pytest.fixture
def s3(s3_address: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Backend]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    prefix = hashlib.sha256(request.node.name.encode()).hexdigest()[:12]
    made = open_store(f"s3://{BUCKET}/{prefix}?endpoint={s3_address}&region=us-east-1")
    yield made
    made.close()


@pytest.fixture(params=MAKERS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    made = MAKERS[request.param](tmp_path / "store")
    yield made
    made.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(backend: Backend, check: Check) -> None:
    check(backend)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance_of_s3_against_a_server(s3: Backend, check: Check) -> None:
    check(s3)
