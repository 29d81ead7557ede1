"""When window KV goes to host memory, and which request gets it back.

It is kept where a later hit is likely to end: at the last block of a prompt, of a request that ends or is
preempted, and at a hit that was replayed, which others of the same prefix will have too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from vllm_deepinfer.policy.replay import window_suffices

from .ledger import Ledger
from .message import WindowCopy
from .tier import Kept, WindowTier


class WindowKeeper:
    """The scheduler's side of window KV in host memory.

    Args:
        manager: vLLM's KVCacheManager.
        kv_cache_config: vLLM's.
        ledger: Where requests' window KV begins.
        capacity: Bytes; 0 turns it off.
        ttl: Seconds for which window KV is kept.
    """

    def __init__(self, manager: Any, kv_cache_config: Any, ledger: Ledger, capacity: int, ttl: float) -> None:
        self._manager, self._ledger = manager, ledger
        groups = kv_cache_config.kv_cache_groups
        self._groups = [i for i, group in enumerate(groups) if group.kv_cache_spec.prefix_replay_tokens]
        self.bytes_per_slot = sum(
            _bytes_per_token(groups[i].kv_cache_spec) * ledger.window for i in self._groups
        )
        self._block_size = groups[self._groups[0]].kv_cache_spec.block_size if self._groups else 0
        slots = capacity // self.bytes_per_slot if self.bytes_per_slot and manager.enable_caching else 0
        self._tier = WindowTier(slots, ttl)
        self._on = slots > 0
        self._pinned: dict[str, tuple[Any, int]] = {}
        self._saves: list[WindowCopy] = []

    def __len__(self) -> int:
        return len(self._tier)

    def find(self, request: Any, hit: int, now: float) -> Kept | None:
        """Window KV for a hit of a request, good enough for the layers behind the last KV source."""
        key = self._key(request, hit)
        kept = self._tier.find(key, now) if key is not None else None
        if kept is None:
            return None
        start, window = self._ledger.start_behind(request), self._ledger.window
        return kept if window_suffices(hit, start, window, kept.floor) else None

    def pin(self, request: Any, hit: int, now: float) -> Kept:
        """What `find` found; it stays until the request loads or forgets it."""
        kept = self.find(request, hit, now)
        assert kept is not None
        kept.pins += 1
        self._pinned[request.request_id] = (self._key(request, hit), hit)
        return kept

    def load(self, request: Any, now: float) -> WindowCopy | None:
        """The order to load what is pinned for a request, now that it has blocks."""
        key, hit = self._pinned.pop(request.request_id, (None, 0))
        kept = self._tier.pinned(key) if key is not None else None
        if kept is None:
            return None
        kept.pins -= 1
        self._tier.use(key, now)
        blocks = self._blocks(request.request_id, hit)
        assert blocks is not None, "an adopted hit has blocks for its last window"
        return WindowCopy(kept.slot, hit, blocks)

    def forget(self, request_id: str) -> None:
        """The request does not load what was pinned for it."""
        key, _ = self._pinned.pop(request_id, (None, 0))
        kept = self._tier.pinned(key) if key is not None else None
        if kept is not None:
            kept.pins -= 1

    def keep_reached(self, requests: Mapping[str, Any], now: float) -> None:
        """Before a step: keep windows of those requests that the last step took to a likely end of a hit."""
        if not self._on:
            return
        for key, position in self._ledger.take_reached():
            if key in requests:
                self._keep(requests[key], position, now)

    def keep_last(self, request: Any, now: float) -> None:
        """A request gives up its blocks: keep the window in front of its last whole block."""
        if self._on:
            self._keep(request, request.num_computed_tokens, now)

    def take(self) -> tuple[list[WindowCopy], list[int]]:
        """Orders since the last call: copies to host memory, and slots to give back."""
        saves, self._saves = self._saves, []
        return saves, self._tier.take_dropped()

    def clear(self) -> None:
        """Forget all: cached prefixes are no more."""
        self._tier.clear()

    def _keep(self, request: Any, position: int, now: float) -> None:
        """The window in front of the last whole block before a position."""
        entry, hit = self._ledger.find(request.request_id), position // self._block_size * self._block_size
        if entry is None or not entry.begun or hit - self._ledger.window < max(entry.floor, 1):
            return
        key, blocks = self._key(request, hit), self._blocks(request.request_id, hit)
        if key is None or blocks is None:
            return
        kept = self._tier.keep(key, entry.behind, now)
        if kept is not None:
            self._saves.append(WindowCopy(kept.slot, hit, blocks))
            self._ledger.counts.kept_windows += 1

    def _key(self, request: Any, hit: int) -> Any:
        """The hash of the prefix, which has the salt in it; None where it has none."""
        if not self._on or hit % self._block_size:
            return None
        index = hit // self._manager.block_pool.hash_block_size - 1
        return request.block_hashes[index] if 0 <= index < len(request.block_hashes) else None

    def _blocks(self, request_id: str, hit: int) -> dict[int, tuple[int, ...]] | None:
        """By group, the blocks of [hit − W, hit); None where one of them is gone."""
        first, last = (hit - self._ledger.window) // self._block_size, -(-hit // self._block_size)
        tables = self._manager.get_block_ids(request_id)
        blocks = {group: tuple(tables[group][first:last]) for group in self._groups}
        whole = all(len(ids) == last - first and all(ids) for ids in blocks.values())
        return blocks if whole else None


def _bytes_per_token(spec: Any) -> int:
    specs = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    return sum(each.page_size_bytes // each.block_size for each in specs)
