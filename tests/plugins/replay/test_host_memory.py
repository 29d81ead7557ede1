"""Copies of window rows: from the pages of one request to those of another, whatever lies where."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_deepinfer_plugins.model.stores import Hits, PagedStore
from vllm_deepinfer_plugins.replay.host_memory import HostWindows
from vllm_deepinfer_plugins.replay.message import WindowCopy

BLOCK = 4


def stores(count: int, gap: int = 2) -> list[PagedStore]:
    """Stores with numbered rows, in blocks with a gap behind them."""
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=BLOCK),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    made = []
    for number in range(count):
        store = PagedStore(config, f"layers.{number}.w", 3, torch.bfloat16, window=6, hits=Hits.REPLAYED)
        raw = torch.zeros(20, 1, BLOCK + gap, 3, dtype=torch.bfloat16)
        store.bind_kv_cache(raw[:, :, :BLOCK])
        values = torch.arange(20 * BLOCK).view(20, 1, BLOCK, 1) + 100 * number
        raw[:, :, :BLOCK] = values.to(torch.bfloat16)
        made.append(store)
    return made


def rows(store: PagedStore, blocks: list[int], positions: range) -> torch.Tensor:
    return torch.stack([store.kv_cache[blocks[at // BLOCK], at % BLOCK] for at in positions])


@pytest.mark.parametrize("window", [1, 4, 6, 7, 8])
def test_a_window_moves_between_requests(window: int) -> None:
    one, two = stores(2)
    memory = HostWindows({1: [one], 4: [two]}, window)
    old, new, hit = [1, 2, 3, 4], [9, 8, 7, 6], 12
    first = (hit - window) // BLOCK

    def copy(table: list[int]) -> WindowCopy:
        blocks = tuple(table[first : hit // BLOCK])
        return WindowCopy(0, hit, {1: blocks, 4: blocks})

    before = {store: store.kv_cache.clone() for store in (one, two)}
    memory.save(copy(old))
    for store in (one, two):
        store.kv_cache[torch.tensor(old)] = -1.0  # their next owner writes
    memory.load(copy(new))
    reach = range(hit - window, hit)
    for store, was in before.items():
        wanted = torch.stack([was[old[at // BLOCK], at % BLOCK] for at in reach])
        assert torch.equal(rows(store, new, reach), wanted)
        others = [at for at in range(12) if at not in reach]
        assert all(
            torch.equal(store.kv_cache[new[at // BLOCK], at % BLOCK], was[new[at // BLOCK], at % BLOCK])
            for at in others
        )


def test_a_slot_is_overwritten_and_given_back() -> None:
    (one,) = stores(1)
    memory = HostWindows({0: [one]}, 4)
    memory.save(WindowCopy(3, 4, {0: (1,)}))
    memory.save(WindowCopy(3, 4, {0: (2,)}))
    assert len(memory) == 1
    memory.load(WindowCopy(3, 4, {0: (5,)}))
    assert torch.equal(one.kv_cache[5], one.kv_cache[2])
    memory.drop(3)
    memory.drop(3)
    assert len(memory) == 0


def test_the_null_block_is_never_touched() -> None:
    (one,) = stores(1)
    with pytest.raises(AssertionError, match="blocks of its own"):
        HostWindows({0: [one]}, 4).save(WindowCopy(0, 4, {0: (0,)}))
