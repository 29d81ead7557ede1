"""The store as an engine sees it: whatever goes wrong below is a counted miss."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.store.faulty import Faulty
from vllm_deepinfer.policy.retention import Choice
from vllm_deepinfer.store.codec import Opened, Section
from vllm_deepinfer.store.conformance import keys, value
from vllm_deepinfer.store.directory import DirectoryBackend
from vllm_deepinfer.store.errors import StoreError, StoreFull, StoreUnavailable
from vllm_deepinfer.store.keys import Key
from vllm_deepinfer.store.prefix_store import LOOKUP_BATCH, PrefixStore, Saved

SECTIONS = (Section("full 0", 4_000), Section("window 1", 1_000))
CHOICE = Choice(1, 1_000.0)
Save = Callable[[list[Key]], Saved]


@pytest.fixture
def backend(tmp_path: Path) -> Faulty:
    return Faulty(DirectoryBackend(tmp_path / "kv", sync=False))


@pytest.fixture
def store(backend: Faulty) -> PrefixStore:
    return PrefixStore(backend, clock=lambda: 1_800_000_000.0)


def save(store: PrefixStore, chain: list[Key]) -> Saved:
    runs = [(k, [value(k, 5_000)[:4_000], value(k, 5_000)[4_000:]]) for k in chain]
    return store.save(runs, SECTIONS, CHOICE)


def load(store: PrefixStore, key: Key) -> bytes | None:
    loaded = store.load(key, SECTIONS)
    if loaded is None:
        return None
    with loaded:
        return b"".join(bytes(v) for v in loaded.values)


def path_of(backend: Faulty, key: Key) -> Path:
    inner = backend.inner
    assert isinstance(inner, DirectoryBackend)
    return Path(inner._path(key))


def test_save_and_load(store: PrefixStore, backend: Faulty) -> None:
    chain = keys(3)
    assert save(store, chain) == Saved(new=3)
    assert save(store, chain) == Saved(known=3)
    assert [load(store, key) for key in chain] == [value(key, 5_000) for key in chain]
    (stamp,) = {entry.stamp for entry in backend.scan()}
    assert (stamp.expires, stamp.traffic_class) == (1_800_001_000, 1)


@pytest.mark.parametrize("count", [0, 1, LOOKUP_BATCH - 1, LOOKUP_BATCH, LOOKUP_BATCH + 1, 150])
def test_lookup_is_the_longest_prefix_without_a_hole(store: PrefixStore, backend: Faulty, count: int) -> None:
    chain = keys(200)
    save(store, chain[:count] + chain[count + 1 :])
    assert store.lookup(chain) == count
    assert store.lookup([]) == 0
    assert backend.calls.count("contains") == count // LOOKUP_BATCH + 1


def test_a_touch_refreshes(store: PrefixStore, backend: Faulty) -> None:
    (key,) = keys(1)
    save(store, [key])
    store.touch([key], Choice(2, 5_000.0))
    (entry,) = backend.scan()
    assert (entry.stamp.expires, entry.stamp.traffic_class, entry.stamp.hits) == (1_800_005_000, 2, 1)


@pytest.mark.parametrize(
    "error", [StoreError("x"), StoreUnavailable("x"), OSError(5, "x"), RuntimeError("x")]
)
def test_every_failure_below_is_a_miss(store: PrefixStore, backend: Faulty, error: Exception) -> None:
    chain = keys(2)
    save(store, chain)

    def fail(op: str) -> None:
        raise error

    backend.before = fail
    assert store.lookup(chain) == 0
    assert load(store, chain[0]) is None
    assert store.missing(chain) == chain
    store.touch(chain, CHOICE)
    assert save(store, keys(1, "other")) == Saved(failed=1)
    assert store.stats.get("failures", op="lookup") == 2
    assert store.stats.get("failures", op="load") == 1
    backend.before = lambda op: None
    assert load(store, chain[0]) == value(chain[0], 5_000), "and heals"


def test_an_index_that_names_a_missing_object(store: PrefixStore, backend: Faulty) -> None:
    chain = keys(2)
    backend.lies = True
    assert store.lookup(chain) == 2
    assert load(store, chain[0]) is None
    assert store.stats.get("loads", outcome="missing") == 1


def test_evicted_between_lookup_and_load(store: PrefixStore, backend: Faulty) -> None:
    chain = keys(2)
    save(store, chain)
    assert store.lookup(chain) == 2
    backend.delete(chain[:1])
    assert load(store, chain[0]) is None


def test_evicted_during_a_slow_read(store: PrefixStore, backend: Faulty) -> None:
    (key,) = keys(1)
    save(store, [key])
    loaded = store.load(key, SECTIONS)
    assert loaded is not None
    backend.delete([key])
    save(store, keys(20, "pressure"))
    with loaded:
        assert b"".join(bytes(v) for v in loaded.values) == value(key, 5_000)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: flip(path, 0), "magic"),
        (lambda path: flip(path, 100), "header"),
        (lambda path: flip(path, 600), "checksum"),
        (lambda path: flip(path, -1), "checksum"),
        (lambda path: os.truncate(path, 3_000), "truncated"),
        (lambda path: os.truncate(path, 0), "truncated"),
    ],
)
def test_damage_is_a_miss_and_is_repaired(
    store: PrefixStore, backend: Faulty, damage: Callable[[Path], None], why: str
) -> None:
    chain = keys(2)
    save(store, chain)
    damage(path_of(backend, chain[0]))
    assert load(store, chain[0]) is None
    assert store.stats.get("verification_failures", why=why) == 1
    assert backend.contains(chain) == [False, True], "a damaged object goes, so that it is stored anew"
    assert save(store, chain) == Saved(new=1, known=1)
    assert load(store, chain[0]) == value(chain[0], 5_000)


def test_swapped_objects_are_a_miss(store: PrefixStore, backend: Faulty) -> None:
    first, second = keys(2)
    save(store, [first, second])
    a, b = path_of(backend, first), path_of(backend, second)
    a.rename(a.with_suffix(".x"))
    b.rename(a)
    a.with_suffix(".x").rename(b)
    assert load(store, first) is None and load(store, second) is None
    assert store.stats.get("verification_failures", why="key") == 2


def test_objects_of_another_layout_version_are_left_alone(store: PrefixStore, backend: Faulty) -> None:
    (key,) = keys(1)
    save(store, [key])
    path = path_of(backend, key)
    data = bytearray(path.read_bytes())
    data[8] = 2
    path.write_bytes(data)
    assert load(store, key) is None
    assert store.stats.get("verification_failures", why="version") == 1
    assert path.exists(), "whoever wrote it can read it"


def test_a_store_of_another_layout_version_is_not_looked_into(tmp_path: Path) -> None:
    (key,) = keys(1)
    old = PrefixStore(DirectoryBackend(tmp_path))
    save(old, [key])
    (tmp_path / "v1").rename(tmp_path / "v2")
    new = PrefixStore(DirectoryBackend(tmp_path))
    assert new.lookup([key]) == 0
    assert list(new.backend.scan()) == []
    save(new, [key])
    assert load(new, key) == value(key, 5_000)
    assert (tmp_path / "v2" / "objects").is_dir()


def test_a_full_store_asks_for_a_sweep(backend: Faulty) -> None:
    asked: list[int] = []
    store = PrefixStore(backend, on_full=lambda: asked.append(1))

    def full(op: str) -> None:
        if op == "put":
            raise StoreFull("no room")

    backend.before = full
    assert save(store, keys(3)) == Saved(failed=3)
    assert asked == [1]
    assert store.stats.get("saves", outcome="failed") == 3


def test_each_kind_of_trouble_is_logged_once(
    store: PrefixStore, backend: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(op: str) -> None:
        raise StoreError("the disk is gone")

    backend.before = fail
    for _ in range(5):
        load(store, keys(1)[0])
        store.lookup(keys(1))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and all("the disk is gone" in line and "miss" in line for line in lines)


def test_compressed_and_plain_objects_are_both_read(backend: Faulty) -> None:
    first, second = keys(2)
    save(PrefixStore(backend, zstd_level=1), [first])
    plain = PrefixStore(backend)
    save(plain, [second])
    assert [load(plain, key) for key in (first, second)] == [value(first, 5_000), value(second, 5_000)]


def test_several_runs_are_pinned_copied_and_checked(store: PrefixStore, backend: Faulty) -> None:
    chain = keys(3)
    found: dict[int, bytes] = {}
    save(store, chain)

    def copy(i: int, run: Opened) -> bool:
        room = [memoryview(bytearray(4_000)), memoryview(bytearray(1_000))]
        run.copy_to(room)
        found[i] = b"".join(bytes(part) for part in room)
        return True

    assert store.load_into(chain, SECTIONS, copy) is True
    assert found == {i: value(key, 5_000) for i, key in enumerate(chain)}
    assert store.stats.get("loads", outcome="hit") == 3
    assert store.load_into([], SECTIONS, copy) is True
    found.clear()
    assert store.load_into(keys(4), SECTIONS, copy) is False
    assert found == {}, "nothing is copied when a run is missing"
    assert store.stats.get("loads", outcome="missing") == 1


def test_a_run_that_changed_fails_the_load_and_goes(store: PrefixStore, backend: Faulty) -> None:
    chain = keys(3)
    save(store, chain)
    path = path_of(backend, chain[1])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    copied: list[int] = []

    def copy(i: int, run: Opened) -> bool:
        copied.append(i)
        run.copy_to([memoryview(bytearray(4_000)), memoryview(bytearray(1_000))])
        return True

    assert store.load_into(chain, SECTIONS, copy) is False
    assert copied == [0, 1], "the third is not looked at any more"
    assert store.stats.get("verification_failures", why="checksum") == 1
    assert backend.contains(chain) == [True, False, True]
    assert store.load_into(chain[:1], SECTIONS, lambda i, run: False) is False, "who copies may stop"
