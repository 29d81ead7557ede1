"""The command line of the store, as a user runs it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from vllm_deepinfer.cli import run
from vllm_deepinfer.store.base import Item
from vllm_deepinfer.store.conformance import item, keys
from vllm_deepinfer.store.directory import DirectoryBackend
from vllm_deepinfer.store.stamp import Stamp


@pytest.fixture
def store(tmp_path: Path) -> DirectoryBackend:
    backend = DirectoryBackend(tmp_path / "kv", sync=False)
    for i, key in enumerate(keys(6)):
        backend.put(
            Item(key, item(key).parts, Stamp.new(time.time() - 100, 50 if i == 5 else 9_000, 1 + i % 2))
        )
    return backend


def test_stat(store: DirectoryBackend, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["store", "stat", str(store.root)]) == 0
    out = capsys.readouterr().out
    lines = {
        line.split()[1]: line.split() for line in out.splitlines() if "│" in line and len(line.split()) > 3
    }
    assert lines["agent"][3] == "3" and lines["chat"][3] == "3" and lines["all"][3] == "6"
    assert "free:" in out


def test_ls(store: DirectoryBackend, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["store", "ls", str(store.root), "--limit", "2", "--longest"]) == 0
    out = capsys.readouterr().out
    assert keys(6)[5].digest.hex()[:16] in out and "20–24" in out and "expired" in out
    assert keys(6)[0].digest.hex()[:16] not in out
    assert "4 more" in out


def test_verify_finds_and_removes_damage(store: DirectoryBackend, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["store", "verify", str(store.root)]) == 0
    assert "6 objects, 0 damaged." in capsys.readouterr().out
    path = Path(store._path(keys(6)[2]))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert run(["store", "verify", str(store.root)]) == 1
    assert keys(6)[2].digest.hex()[:16] in capsys.readouterr().out
    assert run(["store", "verify", str(store.root), "--delete"]) == 1
    assert run(["store", "verify", str(store.root)]) == 0
    assert "5 objects, 0 damaged." in capsys.readouterr().out


def test_gc(store: DirectoryBackend, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["store", "gc", str(store.root), "--dry-run"]) == 0
    assert "would remove 1 expired" in capsys.readouterr().out
    assert len(list(store.scan())) == 6
    (store.root / "v1" / "tmp" / "x").write_bytes(b"123")
    assert run(["store", "gc", str(store.root), "--garbage-age", "0"]) == 0
    out = capsys.readouterr().out
    assert "removed 1 expired" in out and "removed 1 leftovers, 3 B" in out and "5 objects" in out
    size = next(iter(store.scan())).nbytes
    assert run(["store", "gc", str(store.root), "--capacity", f"{3 * size}B"]) == 0
    assert "removed 3 pressure" in capsys.readouterr().out
    assert store.contains(keys(6)) == [True, True, False, False, False, False]


def test_rm(store: DirectoryBackend, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["store", "rm", str(store.root), keys(6)[1].digest.hex()[:10]]) == 0
    assert store.contains(keys(3)) == [True, False, True]
    assert run(["store", "rm", str(store.root), "--all"]) == 0
    assert list(store.scan()) == []
    assert "removed 5 objects." in capsys.readouterr().out


def test_bench_leaves_nothing(store: DirectoryBackend, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["store", "bench", str(store.root), "--total", "1MiB", "--object-size", "64KiB"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("put", "lookup", "get")) and "16 objects" in out
    assert len(list(store.scan())) == 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stat", "kv"], "relative path"),
        (["stat", "dir:/x"], "nearest is 'directory'"),
        (["stat", "memory:a/b"], "is no name"),
        (["stat", "/x?fast=1"], "no option 'fast'; the nearest is 's"),
        (["stat", "/proc/nothing"], "There is no store at /proc/nothing; an engine makes one, or"),
        (["stat", "/tmp,memory:never-made"], "There is no store at /dev/shm/vllm-deepinfer-never-made;"),
        (["bench", "/proc/nothing"], "The store /proc/nothing cannot be opened"),
        (
            ["bench", "{store}", "--object-size", "5TiB"],
            "no measurement; write an --object-size up to 1.0 GiB",
        ),
        (["bench", "{store}", "--object-size", "1B", "--total", "9TiB"], "9,895,604,649,984 objects of 1 B"),
        (["bench", "{store}", "--object-size", "1GiB", "--total", "90000GiB"], "free; write a --total below"),
        (["stat", "/tmp/a,"], "names no place"),
        (["gc", "{store}", "--capacity", "5GB"], "--capacity is '5GB'; write a size"),
        (["rm", "{store}"], "or give --all"),
        (["rm", "{store}", "abc"], "at least its first eight"),
        (["rm", "{store}", "0000000000"], "no key that begins with '0000000000'"),
        (["frob", "{store}"], "No such command 'frob'"),
    ],
)
def test_mistakes_are_one_sentence(
    store: DirectoryBackend, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run(["store", *(a.format(store=store.root) for a in arguments)]) == 2
    err = capsys.readouterr().err.strip()
    assert words in err.splitlines()[-1]
    assert len(err.splitlines()) == 1 and "Traceback" not in err


def test_looking_makes_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt address is refused, not filled with the folders of an empty store."""
    for command in ("stat", "ls", "verify", "gc"):
        assert run(["store", command, str(tmp_path / "kvv")]) == 2
    assert run(["store", "rm", str(tmp_path / "kvv"), "--all"]) == 2
    assert list(tmp_path.iterdir()) == []
    capsys.readouterr()


def test_a_damaged_folder_is_looked_at_all_the_same(
    store: DirectoryBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    """Foreign files, a folder under an object's name, an empty object."""
    first, second, third = (Path(store._path(key)) for key in keys(3))
    first.unlink()
    first.mkdir()
    second.write_bytes(b"")
    (third.parent / "notes.txt").write_text("not ours")
    (store.root / "v1" / "objects" / "stray").write_text("x")
    assert run(["store", "verify", str(store.root)]) == 1
    out = capsys.readouterr().out
    assert "5 objects, 1 damaged." in out and "an object of 0 bytes has no header" in out
    for command in (["stat"], ["ls"], ["gc", "--garbage-age", "0"]):
        assert run(["store", command[0], str(store.root), *command[1:]]) == 0
    assert (third.parent / "notes.txt").exists(), "what is not ours stays"
