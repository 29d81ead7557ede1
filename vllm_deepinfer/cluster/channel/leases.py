"""Leases: a call that lasts as long as a request, while the request's tokens take another way.

Ray Serve chooses a replica with one call per request, and counts the request for as long as the call lasts.
Request and tokens travel on the token channel. A lease ties the two: it ends with its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class Leases:
    """The leases of one replica, by the key that both ways know.

    Args:
        claim_s: How long a lease waits for its request before it is given up; the gateway that asked for it
            is gone, or has gone elsewhere.

    Attributes:
        unclaimed: Leases, ever, whose request did not come.
    """

    def __init__(self, claim_s: float = 10.0) -> None:
        self._claim_s = claim_s
        self._ends: dict[str, asyncio.Event] = {}
        self._claims: dict[str, asyncio.Event] = {}
        self._keys: dict[str, str] = {}  # by wire id, of requests that have not ended
        self._living: set[str] = set()
        self.unclaimed = 0

    def __len__(self) -> int:
        return len(self._ends)

    async def hold(self, key: str) -> bool:
        """Return when the request of that key has ended; False if it did not come."""
        claim, end = self._claims.setdefault(key, asyncio.Event()), asyncio.Event()
        self._ends[key] = end
        try:
            await asyncio.wait_for(claim.wait(), self._claim_s)
            if key in self._living:  # else it has ended already
                await end.wait()
            return True
        except TimeoutError:
            self.unclaimed += 1
            return False
        finally:
            self._ends.pop(key, None)
            self._claims.pop(key, None)

    def claim(self, key: str, wire_id: str) -> None:
        """The request of that key is here. It may come before its lease does."""
        self._keys[wire_id] = key
        self._living.add(key)
        claim = self._claims.get(key)
        if claim is None:
            claim = self._claims[key] = asyncio.Event()
            asyncio.get_running_loop().call_later(self._claim_s, self._tidy, key)
        claim.set()

    def end(self, wire_ids: Iterable[str]) -> None:
        """These requests have ended, or were refused."""
        for wire_id in wire_ids:
            key = self._keys.pop(wire_id, None)
            if key is None:
                continue
            self._living.discard(key)
            if key in self._ends:
                self._ends[key].set()

    def _tidy(self, key: str) -> None:
        """A claim whose lease never came leaves nothing behind."""
        if key not in self._ends:
            self._claims.pop(key, None)
