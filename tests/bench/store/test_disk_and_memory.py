"""The disk and memory parts measure what they say, and leave nothing."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import pytest

from vllm_deepinfer.bench.store import disk, lookups, memory
from vllm_deepinfer.bench.store.report import TARGETS, Parts
from vllm_deepinfer.store.directory import DirectoryBackend
from vllm_deepinfer.store.memory import MemoryBackend
from vllm_deepinfer.store.prefix_store import PrefixStore


def test_the_disk_part_reads_what_it_wrote_both_ways(tmp_path: Path) -> None:
    found = disk.measure(tmp_path / "disk", 2 * disk.MIB, 100_000)
    assert all(value > 0 for value in astuple(found))
    assert found.store_read >= found.store_read_direct
    assert [p for p in (tmp_path / "disk").rglob("*") if p.is_file()] == []


def test_a_store_that_loses_an_object_ends_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DirectoryBackend, "get", lambda self, key: None)
    with pytest.raises(RuntimeError, match="lost an object"):
        disk.measure(tmp_path / "disk", disk.MIB)
    monkeypatch.setattr(PrefixStore, "load_into", lambda *arguments: False)
    with pytest.raises(RuntimeError, match="lost an object"):
        memory.measure(tmp_path / "kv", memory.MIB, 1)


def test_the_memory_part_gives_its_memory_back(tmp_path: Path) -> None:
    rounds = memory.measure(tmp_path / "kv", 4 * memory.MIB, 2, memory.MIB // 2)
    assert len(rounds) == 2 and all(r.memcpy > 0 and r.store > 0 for r in rounds)
    assert list(MemoryBackend(tmp_path / "kv").scan()) == []
    assert list((tmp_path / "kv" / "v1" / "segments").iterdir()) == []


@pytest.mark.parametrize("make", [lookups.directory, lookups.memory])
def test_lookups_are_right_and_counted(make: lookups.Maker, tmp_path: Path) -> None:
    backend = make(tmp_path / "keys", 300)
    assert len(lookups.times(backend, 300, 40, seed=1)) == 40
    with pytest.raises(RuntimeError, match="wrong answer"):
        lookups.times(backend, 600, 400, seed=1)  # says that keys are there which are not
    backend.close()
    lookups.remove(tmp_path / "keys")
    assert not (tmp_path / "keys").exists()


def test_a_part_that_fails_leaves_its_figures_with_the_reason() -> None:
    told: list[str] = []
    parts = Parts(quick=True, say=told.append)

    def part() -> None:
        parts.add("memory_read_ratio", [0.9])
        raise RuntimeError("a long story\nthe disk is gone")

    parts.run("the memory", ["memory_read_ratio"], part)
    (figure,) = parts.figures
    assert (figure.name, figure.value, figure.reason) == ("memory_read_ratio", None, "the disk is gone")
    assert told == ["the memory", "not measured: the disk is gone"]
    parts.add("memory_read_ratio", [0.6, 0.8, 0.9])
    assert (parts.figures[-1].value, parts.figures[-1].holds) == (0.8, True)
    assert {figure.name for figure in parts.figures} <= set(TARGETS)
