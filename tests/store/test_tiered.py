"""Tiers: what is found below comes up, a failing tier is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.faulty import Faulty
from vllm_deepinfer.store.conformance import item, keys, read, value
from vllm_deepinfer.store.directory import DirectoryBackend
from vllm_deepinfer.store.errors import StoreError, StoreFull
from vllm_deepinfer.store.tiered import TieredBackend


@pytest.fixture
def tiers(tmp_path: Path) -> tuple[TieredBackend, Faulty, Faulty]:
    fast, slow = (Faulty(DirectoryBackend(tmp_path / name, sync=False)) for name in ("fast", "slow"))
    return TieredBackend([fast, slow]), fast, slow


def fail(op: str) -> None:
    raise StoreError("broken")


def full(op: str) -> None:
    if op == "put":
        raise StoreFull("no room")


def test_a_hit_below_is_copied_up(tiers: tuple[TieredBackend, Faulty, Faulty]) -> None:
    both, fast, slow = tiers
    (key,) = keys(1)
    slow.put(item(key))
    assert both.contains([key]) == [True]
    assert read(both, key) == value(key, 5_000)
    both.settle()
    assert read(fast, key) == value(key, 5_000)
    slow.calls.clear()
    assert read(both, key) == value(key, 5_000)
    assert slow.calls == []
    both.close()


def test_a_put_goes_to_all_and_the_slowest_says_whether_it_is_new(
    tiers: tuple[TieredBackend, Faulty, Faulty],
) -> None:
    both, fast, _ = tiers
    first, second = keys(2)
    assert both.put(item(first)) is True
    assert both.put(item(first)) is False
    fast.delete([first])
    assert both.put(item(first)) is False
    assert fast.contains([first]) == [True]
    assert both.put_many([item(first), item(second)]) == [False, True]


def test_a_fast_tier_that_fails_is_skipped(tiers: tuple[TieredBackend, Faulty, Faulty]) -> None:
    both, fast, slow = tiers
    first, second = keys(2)
    both.put(item(first))
    fast.before = fail
    assert both.contains([first, second]) == [True, False]
    assert read(both, first) == value(first, 5_000)
    assert both.put(item(second)) is True
    assert slow.contains([second]) == [True]


def test_a_slow_tier_that_fails_leaves_the_fast_one(tiers: tuple[TieredBackend, Faulty, Faulty]) -> None:
    both, fast, slow = tiers
    first, second, third = keys(3)
    both.put(item(first))
    slow.before = fail
    assert both.contains([first, second]) == [True, False]
    assert read(both, first) == value(first, 5_000)
    with pytest.raises(StoreError):
        both.get(third)
    assert both.put(item(second)) is True
    assert fast.contains([second]) == [True]


def test_all_tiers_that_fail_are_an_error(tiers: tuple[TieredBackend, Faulty, Faulty]) -> None:
    both, fast, slow = tiers
    fast.before, slow.before = full, full
    with pytest.raises(StoreFull):
        both.put(item(keys(1)[0]))
    assert [type(r) for r in both.put_many([item(key) for key in keys(2)])] == [StoreFull, StoreFull]
    fast.before = slow.before = fail
    with pytest.raises(StoreError, match="no tier"):
        both.contains(keys(1))


def test_no_tier_is_no_store() -> None:
    with pytest.raises(ValueError, match="at least one tier"):
        TieredBackend([])
