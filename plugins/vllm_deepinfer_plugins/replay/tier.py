"""Which window KV lies in host memory: the scheduler's index of it, bounded in slots and in time.

Window KV is short-lived: the newest of a conversation is used again within minutes or never. Only the
scheduler decides; the worker copies what it is told to (`host_memory`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

FORGOTTEN = float("-inf")


@dataclass(slots=True)
class Kept:
    """Window KV in front of a hit.

    Attributes:
        slot: in the worker's host memory.
        floor: first position that layers behind the last KV source had when it was kept.
        until: when it expires.
        pins: requests that are to load it.
    """

    slot: int
    floor: int
    until: float
    pins: int = 0


class WindowTier:
    """Least recently used first out; expired ones at once; pinned ones never.

    Args:
        slots: How many it holds; 0 for none.
        ttl: Seconds for which one is kept after it was used last.
    """

    def __init__(self, slots: int, ttl: float) -> None:
        self._free, self._ttl = list(range(slots - 1, -1, -1)), ttl
        self._kept: OrderedDict[Hashable, Kept] = OrderedDict()
        self._dropped: list[int] = []

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: Hashable, now: float) -> Kept | None:
        """What is kept for a hit, and None if nothing is. Looking is no use."""
        kept = self._kept.get(key)
        return kept if kept is not None and now < kept.until else None

    def pinned(self, key: Hashable) -> Kept | None:
        """What is kept under a key and pinned, however old it is."""
        kept = self._kept.get(key)
        return kept if kept is not None and kept.pins else None

    def use(self, key: Hashable, now: float) -> None:
        """It is as good as new, unless all was forgotten meanwhile."""
        if self._kept[key].until > FORGOTTEN:
            self._kept[key].until = now + self._ttl
            self._kept.move_to_end(key)

    def keep(self, key: Hashable, floor: int, now: float) -> Kept | None:
        """Take a slot for a hit; None: it is kept already with as much behind the last KV source, or no slot
        is free and all that is kept is pinned."""
        self.expire(now)
        known = self._kept.get(key)
        if known is not None:
            self.use(key, now)
            if floor >= known.floor or known.pins:
                return None
            known.floor = floor
            return known
        if not self._free and not self._evict():
            return None
        slot = self._free.pop()
        if slot in self._dropped:
            self._dropped.remove(slot)
        kept = self._kept[key] = Kept(slot, floor, now + self._ttl)
        return kept

    def expire(self, now: float) -> None:
        """Let go of what is too old."""
        for key in [key for key, kept in self._kept.items() if kept.until <= now and not kept.pins]:
            self._release(key)

    def clear(self) -> None:
        """Let go of everything, the prefix cache was reset; what is pinned serves those requests alone."""
        for kept in self._kept.values():
            kept.until = FORGOTTEN
        self.expire(FORGOTTEN)

    def take_dropped(self) -> list[int]:
        """Slots that became free since the last call and were not taken again."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _evict(self) -> bool:
        key = next((key for key, kept in self._kept.items() if not kept.pins), None)
        if key is None:
            return False
        self._release(key)
        return True

    def _release(self, key: Hashable) -> None:
        slot = self._kept.pop(key).slot
        self._free.append(slot)
        self._dropped.append(slot)
