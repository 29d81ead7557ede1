"""Faults of processes and disks: kills at every line, full and read-only disks, processes on one prefix."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_deepinfer.bench.store.crashes import Open, at_random, every_line
from vllm_deepinfer.store.base import Backend
from vllm_deepinfer.store.conformance import item, keys, read, value
from vllm_deepinfer.store.directory import DirectoryBackend
from vllm_deepinfer.store.errors import StoreError, StoreFull
from vllm_deepinfer.store.memory import MemoryBackend

RANDOM_KILLS = int(os.environ.get("DEEPINFER_STORE_KILLS", "25"))
OPENERS: dict[str, Callable[[Path], Backend]] = {
    "directory": DirectoryBackend,
    "memory": lambda path: MemoryBackend(path, 256 << 20),
}


@pytest.fixture(params=OPENERS)
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    return lambda: OPENERS[request.param](tmp_path / "kv")


@pytest.mark.slow
@pytest.mark.long
def test_killed_at_every_line(opener: Open) -> None:
    found = every_line(opener)
    assert found.broken == []
    assert found.survived >= 100, "the points were really hit"


def test_killed_at_random(opener: Open) -> None:
    found = at_random(opener, RANDOM_KILLS)
    assert found.broken == []
    assert found.survived == RANDOM_KILLS


def test_a_kill_that_breaks_something_is_reported(tmp_path: Path) -> None:
    """The judge can say no: here a writer publishes before it has written."""

    class Hasty(DirectoryBackend):
        def _write(self, path: str, item: object) -> None:
            Path(path).write_bytes(b"VDI")

    found = every_line(lambda: Hasty(tmp_path / "kv"), limit=3)
    assert found.survived == 0 and found.broken


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB that a test may remount."""
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(path)], capture_output=True)
    if done.returncode:
        pytest.skip("this user may not mount a small file system")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    backend, chain = DirectoryBackend(small_disk), keys(10)
    results = [backend.try_put(item(key, 100_000)) for key in chain]
    stored = [key for key, result in zip(chain, results, strict=True) if result is True]
    assert 2 <= len(stored) <= 5
    assert all(isinstance(result, StoreFull) for result in results if result is not True)
    assert os.listdir(small_disk / "v1" / "tmp") == [], "a put that failed leaves nothing"
    assert [read(backend, key, 100_000) for key in stored] == [value(key, 100_000) for key in stored]
    backend.delete(stored[:1])
    assert backend.put(item(chain[-1], 100_000)) is True


def test_full_shared_memory(small_disk: Path) -> None:
    backend = MemoryBackend(small_disk, 1 << 40)
    with pytest.raises(StoreFull, match="No space left"):
        backend.put(item(keys(1)[0], 100_000))
    assert list(backend.scan()) == [] and backend.collect(0).objects == 0


def test_a_read_only_disk(small_disk: Path) -> None:
    first, second = keys(2)
    DirectoryBackend(small_disk).put(item(first, 9_000))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    backend = DirectoryBackend(small_disk)
    assert read(backend, first, 9_000) == value(first, 9_000)
    with pytest.raises(StoreFull, match="Read-only"):
        backend.put(item(second, 9_000))
    assert backend.put(item(first, 9_000)) is False
    with pytest.raises(StoreError):
        backend.delete([first])
    assert backend.contains([first, second]) == [True, False]


def test_a_file_size_limit_is_a_full_store(tmp_path: Path) -> None:
    backend, (key,) = DirectoryBackend(tmp_path), keys(1)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(StoreFull):
            backend.put(item(key, 50_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert os.listdir(tmp_path / "v1" / "tmp") == []
    assert backend.put(item(key, 50_000)) is True


def test_a_store_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for backend in (DirectoryBackend, MemoryBackend):
        with pytest.raises(StoreError, match="cannot be opened"):
            backend(tmp_path / "file")


def process(work: Callable[[], bool]) -> int:
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return child


def test_eight_writers_and_eight_readers_in_processes(opener: Open) -> None:
    chain, until = keys(8), time.monotonic() + 2.0
    opener().close()

    def write() -> bool:
        backend = opener()
        while time.monotonic() < until:
            for key in chain:
                backend.put(item(key, 20_000))
            backend.delete(chain[::2])
        backend.put_many([item(key, 20_000) for key in chain])
        return True

    def watch() -> bool:
        backend, right = opener(), True
        while time.monotonic() < until:
            for key in chain:
                right &= read(backend, key, 20_000) in (None, value(key, 20_000))
        return right

    children = [process(work) for _ in range(8) for work in (write, watch)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 16
    backend = opener()
    assert [read(backend, key, 20_000) for key in chain] == [value(key, 20_000) for key in chain]
    backend.collect(0.0)
    assert len(list(backend.scan())) == 8


def test_a_segment_that_was_cut_short_is_no_segment(tmp_path: Path) -> None:
    (key,) = keys(1)
    MemoryBackend(tmp_path).put(item(key))
    (segment,) = (tmp_path / "v1" / "segments").iterdir()
    os.truncate(segment, 4_096)
    backend = MemoryBackend(tmp_path)
    assert backend.get(key) is None
    assert backend.put(item(keys(2)[1])) is True


def test_links_that_lead_nowhere_are_misses(tmp_path: Path) -> None:
    backend, (key,) = MemoryBackend(tmp_path), keys(1)
    backend.put(item(key))
    link = Path(backend._path(key))
    for target in ("nonsense", "x.0.0.10", "a.b.c.d", os.readlink(link).replace(".1.", ".9.", 1)):
        link.unlink()
        link.symlink_to(target)
        assert backend.get(key) is None
    assert backend.delete([key]) == [True]
    assert backend.put(item(key)) is True
