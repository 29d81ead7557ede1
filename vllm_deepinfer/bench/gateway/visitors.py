"""Clients of a soak test: they read, leave, dawdle, and check that their answer ended once, and rightly."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any

PATIENCE_S = 240.0  # an answer that takes longer is lost: far beyond what a starved machine needs
ENDINGS = {  # what the last event of a stream holds, if the answer is complete
    "/v1/chat/completions": (b"data: [DONE]",),
    "/v1/messages": (b"event: message_stop",),
    "/v1/responses": (b"event: response.completed", b"event: response.incomplete"),
}
ERRORS = (b'"error"', b"event: error", b"event: response.failed")


class Manner(StrEnum):
    """What a client does."""

    READ = "read"  # a stream to its end
    WHOLE = "whole"  # one document
    LEAVE = "leave"  # after some bytes of a stream
    LEAVE_EARLY = "leave early"  # before anything came
    DAWDLE = "dawdle"  # pause, then read on
    STOP_READING = "stop reading"  # and stay, until the server gives up


class Outcome(StrEnum):
    """How a visit ended."""

    COMPLETE = "complete"
    ERROR = "error"  # the server said so, in a status or an event
    LEFT = "left"  # this client did
    CUT = "cut"  # the server gave up on a client that did not read
    LOST = "lost"  # none of these: no end, two ends, or nothing for too long


@dataclass(frozen=True)
class Visit:
    """One request."""

    path: str
    manner: Manner
    body: bytes
    bytes_before: int  # read so many before doing something else
    pause_s: float


def plan(rng: Random) -> Visit:
    """Draw a visit."""
    path = rng.choice(list(ENDINGS))
    weights = {Manner.READ: 45, Manner.WHOLE: 20, Manner.LEAVE: 15, Manner.LEAVE_EARLY: 8, Manner.DAWDLE: 8}
    weights[Manner.STOP_READING] = 4
    manner = rng.choices(list(weights), list(weights.values()))[0]
    wordy = manner in (Manner.DAWDLE, Manner.STOP_READING)
    body = _body(
        path, manner is not Manner.WHOLE, rng.randrange(200, 400) if wordy else rng.randrange(1, 50), rng
    )
    return Visit(path, manner, json.dumps(body).encode(), rng.randrange(1, 4000), rng.uniform(0.05, 0.5))


def _body(path: str, stream: bool, tokens: int, rng: Random) -> dict[str, Any]:
    text = "tell me a story " * rng.randrange(1, 12)
    body: dict[str, Any] = {"model": "bench", "stream": stream}
    if path == "/v1/responses":
        return body | {"input": text, "max_output_tokens": tokens, "store": rng.random() < 0.3}
    body |= {"messages": [{"role": "user", "content": text}], "max_tokens": tokens}
    if path == "/v1/chat/completions":
        if rng.random() < 0.1:
            body["n"] = 2
        if rng.random() < 0.1 or tokens >= 200:
            body |= {"logprobs": True, "top_logprobs": 5}
    return body


async def visit(port: int, what: Visit, lost: Callable[[str], None] = lambda why: None) -> Outcome:
    """Make one visit; tells `lost` why, if it was. Never raises."""
    seen, stages = bytearray(), ["nothing"]
    try:
        async with asyncio.timeout(PATIENCE_S):
            outcome = await _visit(port, what, seen, stages)
            why = f"answer ended {bytes(seen[-200:])!r}"
    except TimeoutError:
        outcome = Outcome.LOST
        why = f"no end within {PATIENCE_S:g} s, done so far: {stages[-1]}, and seen {bytes(seen[-200:])!r}"
    except OSError as error:
        outcome, why = Outcome.CUT if what.manner is Manner.STOP_READING else Outcome.LOST, repr(error)
    if outcome is Outcome.LOST:
        lost(f"{what.path} {what.manner}: {why}")
    return outcome


async def _visit(port: int, what: Visit, answer: bytearray, stages: list[str]) -> Outcome:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=8192)
    stages.append("connected")
    try:
        head = f"POST {what.path} HTTP/1.1\r\nhost: soak\r\nconnection: close\r\n"
        writer.write(f"{head}content-length: {len(what.body)}\r\n\r\n".encode() + what.body)
        stages.append("asked")
        if what.manner is Manner.LEAVE_EARLY:
            await asyncio.sleep(what.pause_s / 10)
            return Outcome.LEFT
        if what.manner in (Manner.LEAVE, Manner.DAWDLE, Manner.STOP_READING):
            answer += await reader.read(what.bytes_before)
            stages.append("read the beginning")
            if what.manner is Manner.LEAVE:
                return Outcome.LEFT
            await asyncio.sleep(what.pause_s if what.manner is Manner.DAWDLE else 3.0)
        while part := await reader.read(1 << 16):
            answer += part
        return judge(what, bytes(answer))
    finally:
        writer.close()


def judge(what: Visit, answer: bytes) -> Outcome:
    """How a visit that was read to the end of the connection ended."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        return Outcome.ERROR if b'"error"' in body else Outcome.LOST
    if what.manner is Manner.WHOLE:
        try:
            json.loads(body)
        except ValueError:
            return Outcome.LOST
        return Outcome.COMPLETE
    ends = sum(body.count(ending) for ending in ENDINGS[what.path])
    errors = any(mark in body for mark in ERRORS[:1]) and ends == 0
    whole = body.endswith(b"0\r\n\r\n")
    if ends == 1 and whole:
        return Outcome.COMPLETE
    if errors and ends == 0 and whole:
        return Outcome.ERROR
    # The server may give up on who does not read at any byte, the end of the last chunk among them.
    cut = ends == 0 or (ends == 1 and what.manner is Manner.STOP_READING)
    return Outcome.CUT if what.manner in (Manner.STOP_READING, Manner.DAWDLE) and cut else Outcome.LOST
