"""What every backend must do, as checks that a test of any distribution runs.

    for check in CHECKS:
        check(backend)           # a fresh, empty backend each time

A check raises AssertionError with what was expected. The backend is used from several threads at once.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from vllm_deepinfer.store.base import Backend, Item
from vllm_deepinfer.store.codec import Section, decode, encode
from vllm_deepinfer.store.keys import Key, chain
from vllm_deepinfer.store.stamp import Stamp

Check = Callable[[Backend], None]


def keys(count: int, seed: str = "conformance") -> list[Key]:
    """A chain of that many keys."""
    return chain(hashlib.sha256(seed.encode()).digest(), range(count * 4), 4)


def value(key: Key, nbytes: int) -> bytes:
    """Bytes that belong to that key."""
    return hashlib.shake_128(key.digest).digest(nbytes)


def item(key: Key, nbytes: int = 5_000, expires_s: float = 3_600, traffic_class: int = 1) -> Item:
    """An encoded object of `nbytes` of payload in two sections."""
    whole = value(key, nbytes)
    half = nbytes // 2
    sections = (Section("a", half), Section("b", nbytes - half))
    parts = encode(key, sections, [whole[:half], whole[half:]])
    return Item(key, parts, Stamp.new(time.time(), expires_s, traffic_class))


def read(backend: Backend, key: Key, nbytes: int = 5_000) -> bytes | None:
    """The payload of an object that `item` made, checked."""
    blob = backend.get(key)
    if blob is None:
        return None
    half = nbytes // 2
    with blob:
        return b"".join(
            bytes(v) for v in decode(blob.data, key, (Section("a", half), Section("b", nbytes - half)))
        )


def what_is_put_is_read(backend: Backend) -> None:
    """Any size, whole bytes, and only under its own key."""
    for key, nbytes in zip(keys(5), (2, 511, 4_096, 70_001, 3_000_000), strict=True):
        assert backend.get(key) is None, "an empty store has nothing"
        assert backend.put(item(key, nbytes)) is True
        assert read(backend, key, nbytes) == value(key, nbytes)
    assert backend.contains(keys(6)) == [True] * 5 + [False]


def values_are_immutable(backend: Backend) -> None:
    """A second put changes nothing and says so."""
    (key,) = keys(1)
    assert backend.put(item(key)) is True
    other = Item(key, [b"something else"], Stamp.new(time.time(), 60, 1))
    assert backend.put(other) is False, "the key was there already"
    assert read(backend, key) == value(key, 5_000)


def put_many_reports_each(backend: Backend) -> None:
    """As many results as items; one that was there is False."""
    chain_ = keys(12)
    backend.put(item(chain_[3]))
    assert backend.put_many([item(key) for key in chain_]) == [True] * 3 + [False] + [True] * 8
    assert [read(backend, key) for key in chain_] == [value(key, 5_000) for key in chain_]
    assert backend.put_many([]) == []


def delete_removes(backend: Backend) -> None:
    """And reports what was not there."""
    first, second, third = keys(3)
    backend.put_many([item(first), item(second)])
    assert backend.delete([first, third]) == [True, False]
    assert backend.contains([first, second, third]) == [False, True, False]
    assert backend.get(first) is None
    assert backend.put(item(first)) is True, "a deleted key can be put again"
    assert read(backend, first) == value(first, 5_000)


def an_open_blob_outlives_its_object(backend: Backend) -> None:
    """Eviction under a reader: the bytes stay, also when their room is wanted by others."""
    (key, *others) = keys(9)
    backend.put(item(key))
    blob = backend.get(key)
    assert blob is not None
    backend.delete([key])
    backend.put_many([item(other) for other in others])
    half = 2_500
    found = b"".join(bytes(v) for v in decode(blob.data, key, (Section("a", half), Section("b", half))))
    assert found == value(key, 5_000)
    blob.close()
    blob.close()


def stamps_are_kept_and_refreshed(backend: Backend) -> None:
    """The longest expiry wins, hits are counted, a put of what is there is no hit."""
    short, long = keys(2)
    now = time.time()
    backend.put(Item(short, item(short).parts, Stamp.new(now, 100, 7)))
    backend.put(Item(long, item(long).parts, Stamp.new(now, 10_000, 9)))
    backend.touch([short, long, keys(3)[2]], Stamp.new(now + 5, 1_000, 8))
    found = {entry.key: entry.stamp for entry in backend.scan()}
    assert set(found) == {short, long}, "a touch makes no object"
    assert (found[short].traffic_class, found[short].hits) == (8, 1)
    assert found[short].expires == Stamp.new(now + 5, 1_000, 8).expires
    assert (found[long].traffic_class, found[long].hits) == (9, 1)
    assert found[long].expires == Stamp.new(now, 10_000, 9).expires
    backend.put(Item(short, item(short).parts, Stamp.new(now, 50_000, 3)))
    found = {entry.key: entry.stamp for entry in backend.scan()}
    assert (found[short].traffic_class, found[short].hits) == (3, 1)


def a_scan_finds_all(backend: Backend) -> None:
    """Every object once, with the room that it takes."""
    chain_ = keys(40)
    backend.put_many([item(key) for key in chain_])
    entries = list(backend.scan())
    assert sorted(entry.key.name for entry in entries) == sorted(key.name for key in chain_)
    assert {entry.key for entry in entries} == set(chain_)
    assert all(entry.nbytes >= 5_000 for entry in entries)


def collect_leaves_objects_alone(backend: Backend) -> None:
    """There is no garbage in a store whose writers all finished."""
    chain_ = keys(4)
    backend.put_many([item(key) for key in chain_])
    assert backend.collect(0.0).objects == 0
    assert all(backend.contains(chain_))


def eight_writers_and_eight_readers(backend: Backend) -> None:
    """On one prefix: a reader finds nothing or the right bytes, and at the end all is there."""
    chain_ = keys(6)
    wrong: list[str] = []
    stop = threading.Event()

    def write(number: int) -> list[bool]:
        return [backend.put(item(key)) for key in (chain_ if number % 2 else chain_[::-1])]

    def watch(number: int) -> None:
        while not stop.is_set():
            for key in chain_:
                found = read(backend, key)
                if found not in (None, value(key, 5_000)):
                    wrong.append(key.name)

    with ThreadPoolExecutor(16) as pool:
        readers = [pool.submit(watch, number) for number in range(8)]
        try:
            results = list(pool.map(write, range(8)))
        finally:
            stop.set()
        for reader in readers:
            reader.result()
    assert not wrong, f"wrong bytes under {wrong}"
    assert sum(map(sum, results)) >= len(chain_), "somebody put each"
    assert all(backend.contains(chain_))
    assert backend.collect(0.0).objects == 0, "losing a race leaves nothing behind"


CHECKS: tuple[Check, ...] = (
    what_is_put_is_read,
    values_are_immutable,
    put_many_reports_each,
    delete_removes,
    an_open_blob_outlives_its_object,
    stamps_are_kept_and_refreshed,
    a_scan_finds_all,
    collect_leaves_objects_alone,
    eight_writers_and_eight_readers,
)
