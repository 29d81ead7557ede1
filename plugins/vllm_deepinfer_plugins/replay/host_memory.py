"""Window KV in the worker's host memory: rows of all windows by slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..model.stores import PagedStore
from .message import WindowCopy


class HostWindows:
    """Copies rows between pages and host memory.

    Args:
        groups: By KV-cache group, the stores of its windows.
        window: W, rows.
    """

    def __init__(self, groups: Mapping[int, Sequence[PagedStore]], window: int) -> None:
        self._groups, self._window = groups, window
        self._slots: dict[int, list[torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def save(self, copy: WindowCopy) -> None:
        """Rows [hit − W, hit) of every window into a slot."""
        self._slots[copy.slot] = [
            store.rows[self._rows(store, copy, group)].to("cpu", copy=True)
            for group, stores in self._groups.items()
            for store in stores
        ]

    def load(self, copy: WindowCopy) -> None:
        """The same rows from a slot into the pages of another request."""
        rows = iter(self._slots[copy.slot])
        for group, stores in self._groups.items():
            for store in stores:
                store.rows[self._rows(store, copy, group)] = next(rows).to(store.rows.device)

    def drop(self, slot: int) -> None:
        """Give a slot's memory back, if it holds any."""
        self._slots.pop(slot, None)

    def _rows(self, store: PagedStore, copy: WindowCopy, group: int) -> torch.Tensor:
        size, first = store.block_size, copy.hit - self._window
        positions = torch.arange(first, copy.hit)
        blocks = torch.tensor(copy.blocks[group])[positions // size - first // size]
        assert bool((blocks > 0).all()), "window KV of a hit lies in blocks of its own"
        rows: torch.Tensor = blocks * store.rows_per_block + positions % size
        return rows.to(store.rows.device)
