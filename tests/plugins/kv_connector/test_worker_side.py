"""The worker's half on real pages and a real folder: loads, saves, corruption, deadlines, sweeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_deepinfer_plugins.kv_connector.groups import StoredGroup
from vllm_deepinfer_plugins.kv_connector.metadata import LoadTask, RunBlocks, SaveTask, StoreMetadata
from vllm_deepinfer_plugins.kv_connector.pages import PagedKV
from vllm_deepinfer_plugins.kv_connector.settings import StoreSettings
from vllm_deepinfer_plugins.kv_connector.worker_side import WorkerSide

from tests.store.faulty import Faulty
from vllm_deepinfer.policy.retention import Choice
from vllm_deepinfer.store.conformance import keys
from vllm_deepinfer.store.directory import DirectoryBackend
from vllm_deepinfer.store.keys import Key
from vllm_deepinfer.store.prefix_store import PrefixStore
from vllm_deepinfer.store.sweeper import Sweeper

BLOCK, RUN, BLOCKS = 4, 16, 200
CHOICE = Choice(1, 1_000.0)
Make = Callable[..., "Rank"]


class Rank:
    """A worker with one layer of KV, each block filled with its id."""

    def __init__(self, backend: Faulty, sweep: bool = False, writes: bool = True, **settings: Any) -> None:
        self.pages = torch.arange(BLOCKS, dtype=torch.float32).repeat_interleave(8).view(BLOCKS, 1, BLOCK, 2)
        group = StoredGroup(0, BLOCK, None, ("a",), (32,))
        kv = PagedKV((group,), {"a": self.pages}, BLOCKS, RUN)
        given = StoreSettings(store="/unused", **settings)
        self.store = PrefixStore(backend)
        sweeper = Sweeper(backend, 1, given.retention, self.store.stats) if sweep else None
        self.side = WorkerSide(given, self.store, kv, shard=0, writes=writes, sweeper=sweeper)

    def save(self, chain: list[Key], first_block: int = 1, job: int = 0) -> None:
        self.side.submit(StoreMetadata(saves=[SaveTask(job, runs(chain, first_block), CHOICE)]), saves=True)

    def load(self, chain: list[Key], first_block: int, start: int = 0, name: str = "r") -> None:
        task = LoadTask(name, runs(chain, first_block), start)
        self.side.submit(StoreMetadata(loads=[task]), saves=False)

    def saved(self) -> dict[int, int]:
        return dict(until(self.side.saves_done).jobs)

    def loaded(self) -> tuple[set[str], set[str]]:
        found = until(lambda: r if (r := self.side.results()).finished_recving else None)
        return found.finished_recving, found.failed_recving

    def block(self, i: int) -> float:
        return float(self.pages[i].unique())


def runs(chain: list[Key], first_block: int) -> tuple[RunBlocks, ...]:
    per = RUN // BLOCK
    return tuple(
        RunBlocks((key,), (tuple(range(first_block + i * per, first_block + (i + 1) * per)),))
        for i, key in enumerate(chain)
    )


def chain_of(count: int) -> list[Key]:
    return [Key(k.digest, k.parent, i * RUN, RUN) for i, k in enumerate(keys(count))]


def until(ask: Callable[[], Any]) -> Any:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        answer = ask()
        if answer is not None:
            return answer
        time.sleep(0.002)
    raise AssertionError("no answer")


def hang(gate: threading.Event, only: str | None = None) -> Callable[[str], None]:
    def before(op: str) -> None:
        if only in (None, op):
            gate.wait(20)

    return before


@pytest.fixture
def backend(tmp_path: Path) -> Faulty:
    return Faulty(DirectoryBackend(tmp_path / "kv", sync=False))


@pytest.fixture
def make(backend: Faulty) -> Iterator[Make]:
    made: list[Rank] = []

    def build(**more: Any) -> Rank:
        made.append(Rank(backend, **more))
        return made[-1]

    yield build
    for rank in made:
        rank.side.close(timeout_s=2)


def test_what_one_rank_saves_another_loads_into_other_blocks(make: Make) -> None:
    chain, one, two = chain_of(20), make(), make()
    one.save(chain)
    assert one.saved() == {0: 1}
    two.pages.fill_(-1)
    two.load(chain, 100)
    assert two.loaded() == ({"r"}, set())
    assert [two.block(100 + i) for i in range(80)] == [float(1 + i) for i in range(80)]
    assert two.block(99) == two.block(180) == -1, "no other block is touched"


def test_blocks_that_the_engine_has_itself_are_not_written(make: Make) -> None:
    chain, rank = chain_of(2), make()
    rank.save(chain)
    rank.saved()
    rank.load(chain, 50, start=24)
    assert rank.loaded() == ({"r"}, set())
    assert [rank.block(50 + i) for i in range(8)] == [50, 51, 52, 53, 54, 55, 7, 8]


def test_a_missing_and_a_flipped_run_fail_the_load(make: Make, backend: Faulty) -> None:
    chain, rank = chain_of(3), make()
    rank.save(chain)
    rank.saved()
    rank.load(chain_of(4), 50)
    assert rank.loaded() == ({"r"}, {"r"})
    inner = backend.inner
    assert isinstance(inner, DirectoryBackend)
    path = Path(inner._path(chain[1]))
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)
    rank.load(chain, 50)
    assert rank.loaded() == ({"r"}, {"r"})
    assert rank.store.stats.get("verification_failures", why="checksum") == 1
    assert rank.store.stats.get("load_failures") == 2
    rank.save(chain)
    rank.saved()
    rank.load(chain, 50)
    assert rank.loaded() == ({"r"}, set()), "the damaged run was removed and is stored anew"


def test_a_load_that_hangs_is_given_up_and_never_writes(make: Make, backend: Faulty) -> None:
    chain, rank, gate = chain_of(2), make(load_deadline_s=0.05), threading.Event()
    rank.save(chain)
    rank.saved()
    backend.before = hang(gate, "get")
    rank.load(chain, 50)
    assert rank.loaded() == ({"r"}, {"r"})
    assert rank.store.stats.get("deadlines", op="load") == 1 and rank.side.gauges["hung"] > 0
    gate.set()
    until(lambda: True if rank.side.gauges["hung"] == 0 else None)
    assert [rank.block(50 + i) for i in range(8)] == [float(50 + i) for i in range(8)]


def test_a_save_that_hangs_gives_its_blocks_back(make: Make, backend: Faulty) -> None:
    chain, rank, gate = chain_of(1), make(save_deadline_s=0.05), threading.Event()
    backend.before = hang(gate)
    rank.save(chain, job=7)
    assert rank.saved() == {7: 1}
    assert rank.store.stats.get("deadlines", op="save") == 1
    rank.pages.fill_(-5)  # somebody else's by now
    gate.set()
    backend.before = lambda op: None
    until(lambda: True if rank.side.gauges["hung"] == 0 else None)
    assert backend.contains(chain) == [False], "what may be another request's KV is never stored"


def test_while_all_threads_hang_loads_are_refused_at_once(make: Make, backend: Faulty) -> None:
    chain, rank, gate = chain_of(1), make(load_deadline_s=0.02, io_threads=1), threading.Event()
    backend.before = hang(gate)
    for name in ("a", "b"):
        rank.load(chain, 50, name=name)
        assert rank.loaded() == ({name}, {name})
    assert rank.store.stats.get("deadlines", op="load") == 1
    gate.set()


def test_of_ranks_with_the_same_kv_one_writes(make: Make, backend: Faulty) -> None:
    chain, rank = chain_of(1), make(writes=False)
    rank.save(chain, job=3)
    assert rank.saved() == {3: 1}
    assert backend.contains(chain) == [False]


def test_a_full_store_is_swept_soon(make: Make, backend: Faulty) -> None:
    chain, rank = chain_of(2), make(sweep=True, sweep_interval_s=3_600)
    rank.save(chain)
    rank.saved()
    rank.side.sweep_soon()
    until(lambda: None if any(backend.contains(chain)) else True)
    assert rank.store.stats.get("evicted", reason="pressure") == 2
