"""The replica's end of the token channel: serves an engine to any number of gateways."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from vllm_deepinfer.engine import Engine, EngineError, Health, HealthState, Overloaded, TokenDelta

from . import wire
from .leases import Leases
from .outbox import Outbox
from .security import ChannelKeys, check_address

logger = logging.getLogger(__name__)
MOST_HELD = 65_536
"""Requests of a session that are remembered as perhaps held; older ones are left to their lease."""


class _Session:
    """One gateway's requests here. It is the sink of all of them."""

    def __init__(self, name: str, peer: bytes, now: float, wake: Callable[[], None], leases: Leases) -> None:
        self.name, self.peer, self.heard, self._leases = name, peer, now, leases
        self.alive: set[str] = set()
        self.held: OrderedDict[str, None] = OrderedDict()  # perhaps: a fetch or a lease ends it unheard
        self.submitting: dict[str, bool] = {}  # whether an abort came while the engine considers the request
        self.outbox = Outbox()
        self._wake = wake

    def __call__(self, deltas: Sequence[TokenDelta]) -> None:
        ended = [delta.request_id for delta in deltas if delta.final]
        self.alive.difference_update(ended)
        self._leases.end(ended)
        for delta in deltas:
            if delta.kv_source is not None:
                self.held[delta.request_id] = None
                if len(self.held) > MOST_HELD:
                    self.held.popitem(last=False)
        self.outbox.add(deltas)
        self._wake()


FULL_RETRY_S = 0.05
"""When to ask a full replica again: some request of many ends every few steps."""


class EngineServer:
    """Serves one engine on one address. The engine is started and closed by its owner.

    Args:
        engine: Started.
        address: ``tcp://HOST:PORT`` (port 0 or ``*``: any free one) or ``ipc://PATH``.
        keys: Needed beyond the loopback.
        beat_s: Interval of `wire.State`.
        silent_s: A gateway that has said nothing for so long is gone: its requests are aborted.
        most_active: Requests of all gateways together; one more is refused as `Overloaded`. None: no limit.

    Raises:
        ChannelError: An address beyond the loopback without keys.
    """

    def __init__(
        self,
        engine: Engine,
        address: str = "tcp://127.0.0.1:*",
        keys: ChannelKeys | None = None,
        *,
        beat_s: float = 0.5,
        silent_s: float = 5.0,
        most_active: int | None = None,
    ) -> None:
        check_address(address, keys)
        self.engine, self.address = engine, address
        self.leases = Leases()
        self.dropped_sessions = 0
        self.bad_messages = 0
        self._keys, self._beat_s, self._silent_s = keys, beat_s, silent_s
        self._sessions: dict[str, _Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsent = asyncio.Event()
        self._wedged: Health | None = None
        self._most_active = most_active

    async def start(self) -> str:
        """Begin to serve; returns the address with its real port."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a gateway that reconnects keeps its name
        self._socket.setsockopt(zmq.SNDHWM, 0)  # the outboxes bound what is under way
        self._authenticator: AsyncioAuthenticator | None = None
        if self._keys is not None:
            self._authenticator = AsyncioAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(
                credentials_provider=_Only(self._keys.gateway_public)
            )
            self._socket.curve_secretkey = self._keys.replica_secret
            self._socket.curve_publickey = self._keys.replica_public
            self._socket.curve_server = True
        self._socket.bind(self.address.replace(":0", ":*") if self.address.endswith(":0") else self.address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        for loop in (self._receive(), self._send(), self._beat()):
            self._start(loop)
        return self.address

    async def close(self) -> None:
        """Stop serving. Gateways see the silence; the engine goes on."""
        sessions = self._sessions.values()
        await self.engine.abort([one for session in sessions for one in (*session.alive, *session.held)])
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)

    def health(self) -> Health:
        """The engine's. One that was found wedged stays so until a step of it has ended: without work, which
        its gateways take away, it would look well and be given more."""
        health = self.engine.health()
        if health.state is HealthState.WEDGED:
            self._wedged = health
        elif self._wedged is not None and health.steps != self._wedged.steps:
            self._wedged = None
        return self._wedged if self._wedged is not None and health.serving else health

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _receive(self) -> None:
        while True:
            peer, data = await self._socket.recv_multipart()
            try:
                message = wire.from_gateway(data)
            except (msgspec.DecodeError, EngineError) as error:
                self.bad_messages += 1
                if self.bad_messages == 1:  # counted afterwards: a broken peer repeats itself
                    logger.warning("A message on the token channel is none of ours: %s", error)
                continue
            await self._handle(peer, message)

    async def _handle(self, peer: bytes, message: wire.ToReplica) -> None:
        if isinstance(message, wire.Hello):
            await self._open(peer, message)
            return
        session = self._sessions.get(message.session)
        if session is None:
            text = "this replica knows no such session: it was restarted, or had not heard from you"
            await self._say(peer, wire.Rejected(message.session, text))
            return
        session.heard = time.monotonic()
        if isinstance(message, wire.Submit):
            session.alive.add(message.request.request_id)
            session.submitting[message.request.request_id] = False
            self._start(self._submit(session, message))
        elif isinstance(message, wire.Abort):
            for wire_id in session.submitting.keys() & set(message.wire_ids):
                session.submitting[wire_id] = True
            for wire_id in message.wire_ids:
                session.held.pop(wire_id, None)
            await self.engine.abort(message.wire_ids)
            await self._say(peer, wire.Aborted(message.number, self.engine.load()))
        elif isinstance(message, wire.Beat):
            session.outbox.acknowledge(message.received)
            self._unsent.set()
        else:
            await self._drop(session)

    async def _open(self, peer: bytes, hello: wire.Hello) -> None:
        if hello.version != wire.VERSION:
            text = f"the gateway speaks version {hello.version} of the channel, this replica {wire.VERSION}"
            await self._say(peer, wire.Rejected(hello.session, text))
            return
        if hello.session not in self._sessions:
            self._sessions[hello.session] = _Session(
                hello.session, peer, time.monotonic(), self._unsent.set, self.leases
            )
        await self._say(peer, wire.Welcome(hello.session, self.engine.info))
        await self._say_state(self._sessions[hello.session])

    async def _submit(self, session: _Session, message: wire.Submit) -> None:
        wire_id = message.request.request_id
        if message.lease:
            self.leases.claim(message.lease, wire_id)
        try:
            alive = sum(len(one.alive) for one in self._sessions.values())
            if self._most_active is not None and alive > self._most_active:  # this one is among them
                raise Overloaded(f"the replica has its {self._most_active} requests.", FULL_RETRY_S)
            await self.engine.submit(message.request, session)
        except EngineError as error:
            session.alive.discard(wire_id)
            self.leases.end([wire_id])
            session.submitting.pop(wire_id, None)
            retry = error.retry_after_s if isinstance(error, Overloaded) else 0.0
            await self._say(session.peer, wire.Refused(wire_id, type(error).__name__, str(error), retry))
            return
        if session.submitting.pop(wire_id, True) or session.name not in self._sessions:
            await self.engine.abort([wire_id])
            return
        await self._say(session.peer, wire.Accepted(wire_id, self.engine.load()))

    async def _send(self) -> None:
        while True:
            await self._unsent.wait()
            self._unsent.clear()
            for session in list(self._sessions.values()):
                step = session.outbox.take()
                if step is not None:
                    await self._say(session.peer, wire.Step(*step, self.engine.load()))
                elif session.outbox.overflows:
                    logger.warning("A gateway does not fetch its tokens: its requests are aborted.")
                    await self._drop(session)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            for session in list(self._sessions.values()):
                if time.monotonic() - session.heard > self._silent_s:
                    await self._drop(session)
                else:
                    await self._say_state(session)

    async def _drop(self, session: _Session) -> None:
        self._sessions.pop(session.name, None)
        self.dropped_sessions += 1
        await self.engine.abort([*session.alive, *session.held])

    async def _say_state(self, session: _Session) -> None:
        state = wire.State(session.name, session.outbox.sent, self.engine.load(), self.health())
        await self._say(session.peer, state)

    async def _say(self, peer: bytes, message: wire.Message) -> None:
        await self._socket.send_multipart([peer, wire.encode(message)])


class _Only:
    """Lets one public key (Z85, as pyzmq makes and shows them) in."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        """What pyzmq asks about a peer."""
        return key == self._key
