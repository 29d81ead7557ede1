"""The sweeper: capacity, reasons, tiers, garbage, and clocks that jump."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.store.faulty import Faulty
from vllm_deepinfer.policy.retention import Retention
from vllm_deepinfer.store.base import Item
from vllm_deepinfer.store.conformance import item, keys
from vllm_deepinfer.store.directory import DirectoryBackend
from vllm_deepinfer.store.errors import StoreError
from vllm_deepinfer.store.keys import Key
from vllm_deepinfer.store.memory import MemoryBackend
from vllm_deepinfer.store.stamp import Stamp
from vllm_deepinfer.store.stats import StoreStats
from vllm_deepinfer.store.sweeper import Sweeper, sweep_quietly
from vllm_deepinfer.store.tiered import TieredBackend

NOW = 1_800_000_000.0


class Clock:
    """A wall clock and a monotonic one that a test moves."""

    def __init__(self) -> None:
        self.wall, self.monotonic = NOW, 50.0

    def advance(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds


def put(backend: DirectoryBackend, chain: list[Key], ttl_s: float, used: float = NOW) -> None:
    for key in chain:
        backend.put(Item(key, item(key).parts, Stamp.new(used, ttl_s, 1)))


@pytest.fixture
def backend(tmp_path: Path) -> DirectoryBackend:
    return DirectoryBackend(tmp_path / "kv", sync=False)


def sweeper(backend: object, capacity: int | None, clock: Clock, stats: StoreStats | None = None) -> Sweeper:
    return Sweeper(
        backend,  # type: ignore[arg-type]
        capacity,
        Retention(),
        stats,
        wall=lambda: clock.wall,
        monotonic=lambda: clock.monotonic,
    )


def test_expired_objects_go_and_are_counted(backend: DirectoryBackend) -> None:
    clock, stats = Clock(), StoreStats()
    put(backend, keys(3, "short"), 100)
    put(backend, keys(4, "long"), 10_000)
    sweeps = sweeper(backend, None, clock, stats)
    first = sweeps.sweep()
    assert (first.objects, dict(first.removed)) == (7, {})
    clock.advance(101)
    second = sweeps.sweep()
    assert (second.objects, dict(second.removed)) == (4, {"expired": 3})
    assert stats.get("evicted", reason="expired") == 3
    assert stats.get("evicted_bytes", reason="expired") == second.removed_bytes["expired"] > 15_000


def test_capacity_is_kept_and_chains_lose_their_ends(backend: DirectoryBackend) -> None:
    chain, clock = keys(10), Clock()
    put(backend, chain, 1_000)
    size = next(iter(backend.scan())).nbytes
    result = sweeper(backend, 8 * size, clock).sweep()
    assert dict(result.removed) == {"pressure": 3}, "down to 90 % of eight"
    assert backend.contains(chain) == [True] * 7 + [False] * 3
    assert result.nbytes == 7 * size


def test_progress_is_told(backend: DirectoryBackend) -> None:
    put(backend, keys(300), 1)
    clock, seen = Clock(), list[tuple[int, int]]()
    clock.advance(10)
    sweeper(backend, None, clock).sweep(lambda done, total: seen.append((done, total)))
    assert seen == [(256, 300), (300, 300)]


@pytest.mark.parametrize("jump", [30 * 86_400.0, -30 * 86_400.0])
def test_a_clock_that_jumps_is_not_believed_at_once(backend: DirectoryBackend, jump: float) -> None:
    clock, stats = Clock(), StoreStats()
    put(backend, keys(5), 3 * 86_400)
    sweeps = sweeper(backend, None, clock, stats)
    sweeps.sweep()
    clock.advance(60)
    clock.wall += jump
    jumped = sweeps.sweep()
    assert jumped.clock_jumped and not jumped.removed
    assert stats.get("clock_jumps") == 1
    clock.wall -= jump  # the time service puts it right
    clock.advance(60)
    sweeps.sweep()
    clock.advance(60)
    assert sweeps.sweep().objects == 5
    assert all(backend.contains(keys(5)))


def test_a_clock_that_stays_away_is_believed_in_the_end(backend: DirectoryBackend) -> None:
    clock = Clock()
    put(backend, keys(5), 3 * 86_400)
    sweeps = sweeper(backend, None, clock)
    sweeps.sweep()
    clock.wall += 30 * 86_400
    assert not sweeps.sweep().removed
    clock.advance(60)
    assert dict(sweeps.sweep().removed) == {"expired": 5}


def test_a_sleep_of_the_machine_is_no_jump_where_monotonic_time_counts_it(backend: DirectoryBackend) -> None:
    clock = Clock()
    put(backend, keys(2), 100)
    sweeps = sweeper(backend, None, clock)
    sweeps.sweep()
    clock.advance(7 * 86_400)
    assert dict(sweeps.sweep().removed) == {"expired": 2}


def test_garbage_of_crashed_writers(backend: DirectoryBackend) -> None:
    (backend.root / "v1" / "tmp" / "left").write_bytes(b"x" * 100)
    clock, stats = Clock(), StoreStats()
    assert sweeper(backend, None, clock, stats).sweep().garbage.objects == 0, "it may be in the making"
    result = sweeper(backend, None, clock, stats).sweep(garbage_age_s=0)
    assert (result.garbage.objects, result.garbage.nbytes) == (1, 100)
    assert os.listdir(backend.root / "v1" / "tmp") == []
    assert stats.get("evicted", reason="garbage") == 1


def test_each_tier_is_held_to_its_own_capacity(tmp_path: Path) -> None:
    clock = Clock()
    memory = MemoryBackend(tmp_path / "m", 65 << 20)
    directory = DirectoryBackend(tmp_path / "d", sync=False)
    tiers = TieredBackend([memory, directory])
    chain = keys(40)
    for key in chain:
        tiers.put(Item(key, item(key, 3_500_000).parts, Stamp.new(NOW, 1_000, 1)))
    assert sum(memory.contains(chain)) == 18, "one segment of 64 MiB in slots of 3.5 MiB"
    assert sum(directory.contains(chain)) == 40
    sweeper(tiers, 100_000_000, clock).sweep()
    assert directory.contains(chain) == [True] * 25 + [False] * 15
    memory.capacity_bytes = 30_000_000
    sweeper(tiers, 100_000_000, clock).sweep()
    assert sum(memory.contains(chain)) == 7
    assert sum(directory.contains(chain)) == 25
    tiers.close()


def test_a_failing_backend_does_not_end_the_sweeping_thread(backend: DirectoryBackend) -> None:
    faulty, stats = Faulty(backend), StoreStats()

    def fail(op: str) -> None:
        raise StoreError("gone")

    faulty.before = fail
    assert sweep_quietly(sweeper(faulty, None, Clock()), stats) is None
    assert stats.get("failures", op="sweep") == 1
