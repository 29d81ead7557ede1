"""ChannelEngine: an engine in another process, over a Unix socket, one message per engine step.

So the front door is measured as it is deployed, with the engine's own work in another process, and with the
cost of receiving tokens included. Messages are msgpack with a length of 4 bytes in front.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import msgspec

from vllm_deepinfer.engine import (
    EngineDead,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    Health,
    HealthState,
    Load,
    Sink,
    TokenDelta,
)

_LENGTH = struct.Struct("!I")


class Step(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Engine to front door: what one step made, and the engine's load after it."""

    deltas: Sequence[TokenDelta]
    load: Load


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Front door to engine: a new request."""

    request: GenerateRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Front door to engine: end these."""

    request_ids: list[str]


Command = Submit | Abort


class Frames(asyncio.Protocol):
    """Cuts a byte stream into messages."""

    def __init__(self, received: Callable[[memoryview], None], lost: Callable[[], None]) -> None:
        self._received = received
        self._lost = lost
        self._data = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        self._data += data
        start = 0
        while len(self._data) - start >= 4:
            (size,) = _LENGTH.unpack_from(self._data, start)
            if len(self._data) - start - 4 < size:
                break
            message = bytes(self._data[start + 4 : start + 4 + size])
            start += 4 + size
            self._received(memoryview(message))
        if start:
            del self._data[:start]

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()

    def send(self, message: bytes) -> None:
        """Write one message."""
        assert self._transport is not None
        self._transport.write(_LENGTH.pack(len(message)) + message)


class ChannelEngine:
    """The Engine protocol's client side. One front door per channel."""

    def __init__(self, path: str, info: EngineInfo) -> None:
        self._path = path
        self._info = info
        self._load = Load()
        self._steps = 0
        self._alive: dict[str, Sink] = {}
        self._sinks: set[Sink] = set()
        self._aborted: set[str] = set()  # whose last delta from the engine is still to come
        self._empty = asyncio.Event()
        self._empty.set()
        self._frames: Frames | None = None
        self._decode = msgspec.msgpack.Decoder(Step).decode
        self._encode = msgspec.msgpack.Encoder().encode

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def start(self) -> None:
        make = lambda: Frames(self._received, self._lost)  # noqa: E731
        _, self._frames = await asyncio.get_running_loop().create_unix_connection(make, self._path)

    async def submit(self, request: GenerateRequest, sink: Sink) -> None:
        if self._frames is None:
            raise EngineDead("the engine process has gone.")
        self._alive[request.request_id] = sink
        self._sinks.add(sink)
        self._empty.clear()
        self._frames.send(self._encode(Submit(request)))

    async def abort(self, request_ids: Iterable[str]) -> None:
        found = {name: self._alive[name] for name in request_ids if name in self._alive}
        if found and self._frames is not None:
            self._frames.send(self._encode(Abort(list(found))))
        self._aborted.update(found)
        for name, sink in found.items():
            self._deliver([TokenDelta(name, (), FinishReason.ABORT)], sink)

    def load(self) -> Load:
        return self._load

    def health(self) -> Health:
        state = HealthState.DEAD if self._frames is None else HealthState.READY
        return Health(state=state, steps=self._steps)

    async def drain(self) -> None:
        await self._empty.wait()

    async def close(self) -> None:
        self._lost()

    def _received(self, message: memoryview) -> None:
        step = self._decode(message)
        self._load = step.load
        self._steps += 1
        alive, deltas = self._alive, step.deltas
        if len(self._sinks) == 1 and not self._aborted:  # one front door has one sink
            self._deliver(deltas, next(iter(self._sinks)))
            return
        batches: dict[Sink, list[TokenDelta]] = {}
        for delta in deltas:
            if delta.request_id in alive:
                batches.setdefault(alive[delta.request_id], []).append(delta)
            elif delta.finish_reason is not None:
                self._aborted.discard(delta.request_id)
        for sink, batch in batches.items():
            self._deliver(batch, sink)

    def _deliver(self, deltas: Sequence[TokenDelta], sink: Sink) -> None:
        for delta in [delta for delta in deltas if delta.finish_reason is not None]:
            self._alive.pop(delta.request_id, None)
        if not self._alive:
            self._empty.set()
        sink(deltas)

    def _lost(self) -> None:
        self._frames = None
        for name, sink in list(self._alive.items()):
            error = "the engine process has gone."
            self._deliver([TokenDelta(name, (), FinishReason.ERROR, error=error)], sink)
