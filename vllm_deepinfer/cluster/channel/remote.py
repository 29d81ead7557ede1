"""The gateway's end of the token channel: an engine of another process, behind the Engine protocol."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec
import zmq
import zmq.asyncio

from vllm_deepinfer.engine import (
    LOST,
    EngineDead,
    EngineDraining,
    EngineError,
    EngineInfo,
    EngineUnavailable,
    FinishReason,
    GenerateRequest,
    Health,
    HealthState,
    InvalidRequest,
    Load,
    Overloaded,
    Sink,
    TokenDelta,
)
from vllm_deepinfer.engine.delivery import Deliveries
from vllm_deepinfer.engine.validation import check_request

from . import wire
from .outbox import merged
from .security import ChannelKeys, check_address

logger = logging.getLogger(__name__)
_ERRORS: dict[str, type[EngineError]] = {
    kind.__name__: kind for kind in (InvalidRequest, EngineUnavailable, EngineDraining, EngineDead)
}
MOST_HELD = 65_536
"""Requests that are remembered as perhaps held; older ones are left to their lease."""
replaced = msgspec.structs.replace
ACKNOWLEDGE_EVERY = 8
"""Steps; the replica sends at most `Outbox`'s credit without hearing of them."""


class _Stream(msgspec.Struct):
    """One request: its id, its sink, who waits for its acceptance, and what came before he was told."""

    request_id: str
    sink: Sink
    accepted: asyncio.Future[None]
    held: TokenDelta | None = None
    released: bool = False


class RemoteEngine:
    """An engine served by an `EngineServer`.

    A replica that falls silent ends all requests with an error; when it is heard again, or another one at its
    address, a new session begins and the engine is READY again.

    Attributes:
        load_at: When the replica last told its load, by `time.monotonic`.

    Args:
        address: The server's.
        keys: Needed beyond the loopback.
        beat_s: Interval of signs of life.
        silent_s: A replica that has said nothing for so long is lost.
        start_s: Time for the first `Welcome`.
    """

    def __init__(
        self,
        address: str,
        keys: ChannelKeys | None = None,
        *,
        beat_s: float = 0.5,
        silent_s: float = 3.0,
        start_s: float = 30.0,
    ) -> None:
        check_address(address, keys)
        self.address = address
        self.lost_sessions = 0
        self.load_at = -math.inf
        self._keys, self._beat_s, self._silent_s, self._start_s = keys, beat_s, silent_s, start_s
        self._info = EngineInfo(model=address, max_model_len=0)
        self._load, self._health = Load(), Health(state=HealthState.STARTING, detail="Not connected yet.")
        self._streams: dict[str, _Stream] = {}
        self._wire_ids: dict[str, str] = {}
        self._held: OrderedDict[str, str] = OrderedDict()  # by request id; perhaps no longer
        self._aborts: dict[int, asyncio.Future[None]] = {}
        self._deliveries = Deliveries()
        self._numbers = itertools.count(1)
        self._session, self._received, self._heard = "", 0, 0.0
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._draining = self._closed = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def info(self) -> EngineInfo:
        """The remote engine's, as of the newest session."""
        return self._info

    async def start(self) -> None:
        """Connect. Raises: EngineDead without an answer in time."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        if self._keys is not None:
            self._socket.curve_serverkey = self._keys.replica_public
            self._socket.curve_publickey = self._keys.gateway_public
            self._socket.curve_secretkey = self._keys.gateway_secret
        self._socket.connect(self.address)
        self._tasks = [asyncio.ensure_future(loop) for loop in (self._receive(), self._beat())]
        await self._hello()
        try:
            await asyncio.wait_for(self._open.wait(), self._start_s)
        except TimeoutError:
            await self.close()
            raise EngineDead(
                f"no engine replica answered at {self.address} within {self._start_s:g} s."
            ) from None

    async def submit(self, request: GenerateRequest, sink: Sink, lease: str = "") -> None:
        """See `Engine.submit`. ``lease``: the key that a call to the replica waits with (`Leases`)."""
        self._check(request)
        wire_id = f"{self._session}.{next(self._numbers)}"
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._streams[wire_id] = _Stream(request.request_id, sink, accepted)
        self._wire_ids[request.request_id] = wire_id
        self._idle.clear()
        message = wire.Submit(self._session, msgspec.structs.replace(request, request_id=wire_id), lease)
        try:
            await self._say(message)
            await accepted
            # Not before: a caller that is cancelled in the line above must never see a delta.
            asyncio.get_running_loop().call_soon(self._release, wire_id)
        except BaseException as error:
            if self._forget(wire_id) is not None and not isinstance(error, EngineError):
                await self._say(wire.Abort(self._session, 0, [wire_id]))
            raise

    def _check(self, request: GenerateRequest) -> None:
        if self._closed:
            raise EngineUnavailable(f"the connection to the engine replica at {self.address} is closed.")
        if self._draining:
            raise EngineDraining(f"the engine replica at {self.address} takes nothing more from here.")
        if not self._open.is_set():
            raise EngineUnavailable(f"the engine replica at {self.address} does not answer.")
        if request.request_id in self._wire_ids:
            raise InvalidRequest(f"a request with the id {request.request_id} is alive.")
        check_request(request, self._info)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """See `Engine.abort`. The final delta is made here; the replica is told."""
        ids = list(dict.fromkeys(request_ids))
        held = [self._held.pop(one) for one in ids if one in self._held]
        wire_ids = [self._wire_ids[one] for one in ids if one in self._wire_ids]
        # One that is not accepted yet has no deltas to come: its `submit` raises instead.
        ended = [wire_id for wire_id in wire_ids if self._streams[wire_id].accepted.done()]
        self._end(ended, FinishReason.ABORT)
        for wire_id in wire_ids:
            stream = self._forget(wire_id)
            if stream is not None and not stream.accepted.done():
                stream.accepted.set_exception(
                    EngineUnavailable("the request was aborted before it was accepted.")
                )
        wire_ids += held
        if wire_ids and self._open.is_set():
            number, done = next(self._numbers), asyncio.get_running_loop().create_future()
            self._aborts[number] = done
            await self._say(wire.Abort(self._session, number, wire_ids))
            await done

    def load(self) -> Load:
        """The newest that the replica has sent, and at least what it has of this gateway's requests."""
        missing = len(self._streams) - self._load.active_requests
        if missing <= 0:
            return self._load
        return msgspec.structs.replace(self._load, waiting_requests=self._load.waiting_requests + missing)

    def health(self) -> Health:
        """The replica's own, or DEAD while it is silent."""
        return self._health

    async def drain(self) -> None:
        """Nothing more from this gateway; the replica goes on for others."""
        self._draining = True
        if not self._closed:
            self._health = Health(state=HealthState.DRAINING, detail="Draining.")
        await self._idle.wait()

    async def close(self) -> None:
        """See `Engine.close`."""
        if self._closed:
            return
        self._closed = True
        self._lose("the connection to the engine replica was closed.")
        await self._say(wire.Bye(self._session))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=200)
        self._health = Health(state=HealthState.DEAD, detail="Closed.")

    async def _receive(self) -> None:
        while True:
            data = await self._socket.recv()
            try:
                message = wire.from_replica(data)
            except msgspec.DecodeError as error:
                await self._renew(f"the engine replica at {self.address} sent what is no message: {error}")
                continue
            self._heard = time.monotonic()
            if hasattr(message, "load"):
                self.load_at = self._heard
            if isinstance(message, wire.Step):
                await self._step(message)
            elif isinstance(message, wire.State):
                await self._state(message)
            elif isinstance(message, wire.Accepted):
                self._load = message.load
                self._accept(message.wire_id)
            elif isinstance(message, wire.Aborted):
                self._load = message.load
                self._aborted(message.number)
            elif isinstance(message, wire.Refused):
                self._refuse(message)
            elif message.session != self._session:
                pass  # about a session that is over
            elif isinstance(message, wire.Welcome):
                self._info = message.info
            else:
                await self._renew(
                    f"the engine replica at {self.address} ended the session: {message.reason}."
                )

    async def _step(self, step: wire.Step) -> None:
        if step.number != self._received + 1:
            await self._renew(f"a message of the engine replica at {self.address} was lost.")
            return
        self._received, self._load = step.number, step.load
        if (
            self._health.state is HealthState.READY
        ):  # a step is a sign of progress before the next state says so
            self._health = msgspec.structs.replace(self._health, steps=self._health.steps + 1, idle_s=0.0)
        sends: list[tuple[Sink, TokenDelta]] = []
        for delta in step.deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue  # aborted here meanwhile
            if stream.released and delta.finish_reason is None:  # all but the first and last of an answer
                sends.append((stream.sink, replaced(delta, request_id=stream.request_id)))
                continue
            self._accept(delta.request_id)
            if not stream.released:
                stream.held = delta if stream.held is None else merged(stream.held, delta)
                continue
            if delta.final:
                self._note_hold(stream, delta)
                self._forget(delta.request_id)
            sends.append((stream.sink, replaced(delta, request_id=stream.request_id)))
        self._deliveries.send(sends)
        if step.number % ACKNOWLEDGE_EVERY == 0:
            await self._say(wire.Beat(self._session, self._received))

    def _note_hold(self, stream: _Stream, final: TokenDelta) -> None:
        """Its KV may be held: `abort` has to reach it."""
        if final.kv_source is not None:
            self._held[stream.request_id] = final.request_id
            if len(self._held) > MOST_HELD:
                self._held.popitem(last=False)

    def _release(self, wire_id: str) -> None:
        stream = self._streams.get(wire_id)
        if stream is None:
            return
        stream.released = True
        if stream.held is not None:
            if stream.held.final:
                self._note_hold(stream, stream.held)
                self._forget(wire_id)
            delta = msgspec.structs.replace(stream.held, request_id=stream.request_id)
            self._deliveries.send([(stream.sink, delta)])

    async def _state(self, state: wire.State) -> None:
        if state.session != self._session:
            return
        if state.steps > self._received:  # steps come before the state that counts them
            await self._renew(f"a message of the engine replica at {self.address} was lost.")
            return
        self._load = state.load
        if not self._draining:
            self._health = state.health
        self._open.set()  # the first state follows the welcome

    def _accept(self, wire_id: str) -> None:
        stream = self._streams.get(wire_id)
        if stream is not None and not stream.accepted.done():
            stream.accepted.set_result(None)

    def _aborted(self, number: int) -> None:
        done = self._aborts.pop(number, None)
        if done is not None and not done.done():
            done.set_result(None)

    def _refuse(self, message: wire.Refused) -> None:
        stream = self._forget(message.wire_id)
        if stream is None or stream.accepted.done():
            return
        if message.error == Overloaded.__name__:
            stream.accepted.set_exception(Overloaded(message.text, message.retry_after_s))
        else:
            stream.accepted.set_exception(_ERRORS.get(message.error, EngineUnavailable)(message.text))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            if self._open.is_set() and time.monotonic() - self._heard > self._silent_s:
                await self._renew(
                    f"the engine replica at {self.address} was not heard for {self._silent_s:g} s."
                )
            elif self._open.is_set():
                await self._say(wire.Beat(self._session, self._received))
            else:
                await self._say(wire.Hello(wire.VERSION, self._session))

    async def _renew(self, why: str) -> None:
        """The session is lost: end what it had and ask for a new one."""
        self.lost_sessions += 1
        logger.warning("%s Its %d requests end with an error.", why.capitalize(), len(self._streams))
        self._lose(why)
        await self._say(wire.Bye(self._session))
        await self._hello()

    async def _hello(self) -> None:
        self._session, self._received = secrets.token_hex(8), 0
        await self._say(wire.Hello(wire.VERSION, self._session))

    def _lose(self, why: str) -> None:
        self._open.clear()
        if not self._draining:
            self._health = Health(state=HealthState.DEAD, detail=why)
        self._load = Load()
        self._held.clear()  # the replica releases what a session leaves behind
        for number in list(self._aborts):
            self._aborted(number)
        accepted = [wire_id for wire_id, stream in self._streams.items() if stream.accepted.done()]
        self._end(accepted, FinishReason.ERROR, why)
        for wire_id in list(self._streams):
            stream = self._forget(wire_id)
            if stream is not None and not stream.accepted.done():
                stream.accepted.set_exception(EngineUnavailable(why))

    def _end(self, wire_ids: Sequence[str], reason: FinishReason, why: str | None = None) -> None:
        sends: list[tuple[Sink, TokenDelta]] = []
        for wire_id in wire_ids:
            stream = self._forget(wire_id)
            if stream is not None:
                lost = LOST if reason is FinishReason.ERROR else None
                delta = TokenDelta(stream.request_id, (), reason, lost, error=why)
                sends.append((stream.sink, delta))
        self._deliveries.send(sends)

    def _forget(self, wire_id: str) -> _Stream | None:
        stream = self._streams.pop(wire_id, None)
        if stream is not None and self._wire_ids.get(stream.request_id) == wire_id:
            del self._wire_ids[stream.request_id]
        if not self._streams:
            self._idle.set()
        return stream

    async def _say(self, message: wire.Message) -> None:
        """Never waits: there is no high-water mark, and a peer that refuses us gets nothing."""
        with contextlib.suppress(zmq.Again):
            await self._socket.send(wire.encode(message), zmq.NOBLOCK)
