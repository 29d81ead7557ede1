"""What travels between a gateway and an engine replica, as msgpack over one ZeroMQ connection.

A connection begins a *session* (`Hello`). Requests have wire ids that no other request ever had, so that a
late delta of an aborted request cannot be taken for one of its successor's. Steps are numbered per session: a
gap means that a message was lost, and then every request of the session ends in an error rather than short of
a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vllm_deepinfer.engine.messages import EngineInfo, GenerateRequest, Health, Load, TokenDelta

VERSION = 3
"""Both ends must have the same; raise it with every change of a message."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all messages; the type's name comes first."""


class Hello(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Gateway: begin a session. ``session`` is the gateway's own random name for it."""

    version: int
    session: str


class Submit(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Gateway: accept this request, whose id is the wire id. Answered by `Accepted` or `Refused`.

    ``lease`` is the key under which a call to the replica waits for the request's end; "": none does.
    """

    session: str
    request: GenerateRequest
    lease: str = ""


class Abort(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Gateway: end these wire ids. Answered by `Aborted` with the same number."""

    session: str
    number: int
    wire_ids: Sequence[str]


class Beat(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Gateway, at intervals and after some steps: alive, and has all steps up to ``received``."""

    session: str
    received: int


class Bye(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Gateway: the session is over; what is left of it is aborted."""

    session: str


class Welcome(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Replica: the session is open."""

    session: str
    info: EngineInfo


class Rejected(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Replica: no session of that name, or none with that version. ``reason`` is one sentence."""

    session: str
    reason: str


class Accepted(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Replica: the engine has accepted the request."""

    wire_id: str
    load: Load


class Aborted(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Replica: that abort is done."""

    number: int
    load: Load


class Refused(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Replica: the engine has not accepted it; ``error`` is the name of a class in engine.errors."""

    wire_id: str
    error: str
    text: str
    retry_after_s: float = 0.0


class Step(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Replica: the deltas of an engine step (or of several, if the gateway is slow)."""

    number: int
    deltas: Sequence[TokenDelta]
    load: Load


class State(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Replica, at intervals: how it is. ``steps`` is the number of the session's newest step."""

    session: str
    steps: int
    load: Load
    health: Health


ToReplica = Hello | Submit | Abort | Beat | Bye
ToGateway = Welcome | Rejected | Accepted | Aborted | Refused | Step | State

_encoder = msgspec.msgpack.Encoder()
_from_gateway = msgspec.msgpack.Decoder(ToReplica)
_from_replica = msgspec.msgpack.Decoder(ToGateway)


def encode(message: Message) -> bytes:
    """One message as bytes."""
    return _encoder.encode(message)


def from_gateway(data: bytes) -> ToReplica:
    """Raises: msgspec.DecodeError for anything else than such a message."""
    return _from_gateway.decode(data)


def from_replica(data: bytes) -> ToGateway:
    """Raises: msgspec.DecodeError for anything else than such a message."""
    return _from_replica.decode(data)
