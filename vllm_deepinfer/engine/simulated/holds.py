"""Hand-over between simulated engines: who holds what, and whether it still did when the fetch had ended.

Engines of one process find each other here. Of an engine in another process it can only be said whether that
process is alive; its hold ends by `abort` or by its lease.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import msgspec


class KvSource(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulated engine puts into `TokenDelta.kv_source`."""

    layout: str
    engine: str
    hold: int
    host: str
    process: int

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> KvSource | None:
        """None for what no simulated engine has made."""
        try:
            return msgspec.convert(value, cls)
        except msgspec.ValidationError:
            return None


@dataclass(slots=True)
class _Hold:
    request_id: str
    blocks: list[int]


class Holds:
    """The holds of one engine.

    Args:
        layout: of its KV.
        free: gives the blocks of a request back.
    """

    _engines: ClassVar[WeakValueDictionary[str, Holds]] = WeakValueDictionary()

    def __init__(self, layout: str, free: Callable[[str, list[int]], None]) -> None:
        self.alive = True
        self._layout, self._free = layout, free
        self._name = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self._holds: dict[int, _Hold] = {}
        self._by_request: dict[str, int] = {}
        self._engines[self._name] = self

    def __len__(self) -> int:
        return len(self._holds)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    def add(self, request_id: str, blocks: list[int]) -> KvSource:
        """Hold blocks for whoever asks with the source."""
        number = next(self._numbers)
        self._holds[number] = _Hold(request_id, blocks)
        self._by_request[request_id] = number
        return KvSource(
            layout=self._layout,
            engine=self._name,
            hold=number,
            host=socket.gethostname(),
            process=os.getpid(),
        )

    def release(self, number: int) -> bool:
        """End a hold. Returns whether there was one."""
        hold = self._holds.pop(number, None)
        if hold is None:
            return False
        del self._by_request[hold.request_id]
        self._free(hold.request_id, hold.blocks)
        return True

    def release_request(self, request_id: str) -> bool:
        """End the hold of a request. Returns whether there was one."""
        number = self._by_request.get(request_id)
        return number is not None and self.release(number)

    def fetched(self, source: KvSource) -> bool:
        """Whether a fetch from there that has just ended brought what it should; ends the hold."""
        if source.layout != self._layout:
            return False
        peer = self._engines.get(source.engine)
        if peer is not None:
            return peer.alive and peer.release(source.hold)
        elsewhere = source.host != socket.gethostname() or source.process != os.getpid()
        return elsewhere and _process_lives(source)

    def fits(self, source: KvSource | None) -> bool:
        """Whether it is worth a try."""
        return source is not None and source.layout == self._layout


def _process_lives(source: KvSource) -> bool:
    if source.host != socket.gethostname():
        return True  # nobody here can say
    try:
        os.kill(source.process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
