"""Addresses: what opens what, tiers, and backends of other distributions."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.store import uri
from vllm_deepinfer.store.base import Backend
from vllm_deepinfer.store.conformance import CHECKS, item, keys, read, value
from vllm_deepinfer.store.directory import DirectoryBackend
from vllm_deepinfer.store.measured import Measured
from vllm_deepinfer.store.memory import MemoryBackend
from vllm_deepinfer.store.stats import StoreStats
from vllm_deepinfer.store.tiered import TieredBackend
from vllm_deepinfer.store.uri import open_store, size


def test_a_path_is_a_directory(tmp_path: Path) -> None:
    for address in (f"{tmp_path}/a", f"directory:{tmp_path}/a", f"directory://{tmp_path}/a?direct=1&sync=0"):
        backend = open_store(address)
        assert isinstance(backend, DirectoryBackend) and backend.root == tmp_path / "a"


def test_memory_and_its_capacity(tmp_path: Path) -> None:
    backend = open_store(f"memory:{tmp_path}/m?capacity=3MiB")
    assert isinstance(backend, MemoryBackend) and backend.capacity_bytes == 3 << 20


def test_tiers_are_measured_each(tmp_path: Path) -> None:
    stats = StoreStats()
    backend = open_store(f"memory:{tmp_path}/m, {tmp_path}/d", stats)
    assert isinstance(backend, TieredBackend)
    assert [type(t) for t in backend.tiers] == [Measured, Measured]
    (key,) = keys(1)
    backend.put(item(key))
    assert read(backend, key) == value(key, 5_000)
    assert stats.get("puts", tier="memory") == stats.get("puts", tier="directory") == 1
    assert stats.get("gets", tier="memory", found="yes") == 1
    assert stats.get("gets", tier="directory", found="yes") == 0
    histograms = stats.take()["histograms"]
    assert sum(histograms["seconds{op=put,tier=directory}"][:-1]) == 1
    backend.close()


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4096", 4096), ("1KiB", 1024), ("512 MiB", 512 << 20), ("3TiB", 3 << 40)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert size(text, "x") == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1", "5GB", "1.5GiB", "GiB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(UserError, match="write a size such as"):
        size(text, "x")


def open_plugin(rest: str, options: dict[str, str]) -> Backend:
    """What another distribution would offer."""
    return DirectoryBackend(Path(rest) / options.get("sub", ""), sync=False)


def test_a_backend_of_another_distribution_by_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint("shelf", f"{__name__}:open_plugin", uri.GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: open_plugin)
    monkeypatch.setattr(uri, "entry_points", lambda group: [point] if group == uri.GROUP else [])
    for number, check in enumerate(CHECKS):
        check(open_store(f"shelf:{tmp_path}?sub={number}"))
    with pytest.raises(UserError, match="the nearest is 'shelf'"):
        open_store("shelff:/x")


def test_s3_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(UserError, match=r"install 'vllm-deepinfer\[s3\]'"):
        open_store("s3://bucket/x")


def test_an_s3_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="the extra s3 is not installed")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    with pytest.raises(UserError, match="s3 store does not answer"):
        open_store("s3://bucket/x?endpoint=http://127.0.0.1:9&region=us-east-1&timeout_s=0.2")
