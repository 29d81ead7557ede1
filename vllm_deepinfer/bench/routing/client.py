"""Replays a trace against front doors, a process of its own: `python -m … PLAN RESULT`, both JSON files.
Says `ready` when the result is written.

Every answer is checked token by token against what a simulated engine answers to that prompt, after the last
one has ended.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import cast

import msgspec

from vllm_deepinfer.bench.gateway.lines import go_first
from vllm_deepinfer.bench.routing.trace import Arrival
from vllm_deepinfer.bench.routing.words import expected_words, prompt_of, words_of

END = b"0\r\n\r\n"
TEXT_EVENT = re.compile(rb'"content":"(?=[^"])')
TAIL = len(b'"content":"')  # too short to hold an event that was counted


class Plan(msgspec.Struct, frozen=True):
    """What to do.

    Attributes: `ports` of the front doors, taken in turn; `patience_s`: after the last arrival; what has not
    ended then is given up, by closing its connection.
    """

    ports: list[int]
    model: str
    arrivals: list[Arrival]
    patience_s: float


class Record(msgspec.Struct):
    """One request, times in seconds from the trace's start.

    Attributes: `sent` may be later than its arrival if the client was late; `events`: when each token came;
    `ended`: when the whole answer was there, None if it was not; `fault`: what the front door said instead.
    """

    sent: float
    events: list[float] = []
    ended: float | None = None
    fault: str = ""
    missing: int = 0
    doubled: int = 0


class Replay:
    """All requests of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.idle: dict[int, list[Connection]] = {port: [] for port in plan.ports}
        self.open: set[Connection] = set()
        self.records: list[Record] = []
        self.texts: list[bytearray] = []
        self.began = 0.0

    async def run(self) -> list[Record]:
        """Send everything in time, wait for the answers, check them."""
        self.began = time.monotonic()
        sending = []
        for number, arrival in enumerate(self.plan.arrivals):
            await asyncio.sleep(self.began + arrival.at - time.monotonic())
            sending.append(asyncio.ensure_future(self._send(number, arrival)))
        await asyncio.gather(*sending)
        deadline = time.monotonic() + self.plan.patience_s
        while self.open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for connection in list(self.open):
            connection.give_up()
        for arrival, record, text in zip(self.plan.arrivals, self.records, self.texts, strict=True):
            check(arrival, record, bytes(text))
        return self.records

    async def _send(self, number: int, arrival: Arrival) -> None:
        port = self.plan.ports[number % len(self.plan.ports)]
        record, text = Record(time.monotonic() - self.began), bytearray()
        self.records.append(record)
        self.texts.append(text)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
        body = body_of(self.plan.model, arrival)
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        if self.idle[port]:
            connection = self.idle[port].pop()
        else:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self, port), "127.0.0.1", port
            )
        connection.ask(head.encode() + body, record, text)


class Connection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self, replay: Replay, port: int) -> None:
        self._replay, self._port = replay, port
        self._record, self._text, self._tail = Record(0.0), bytearray(), b""
        self._wrong = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def ask(self, request: bytes, record: Record, text: bytearray) -> None:
        """Send one request; the answer goes into the record."""
        self._record, self._text, self._tail, self._wrong = record, text, b"", False
        self._replay.open.add(self)
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic() - self._replay.began
        if not self._text and not data.startswith(b"HTTP/1.1 200"):
            self._wrong = True
        self._text += data
        if self._wrong:
            self._record.fault = bytes(self._text[:300]).decode(errors="replace")
            self._transport.abort()
            return
        found = len(TEXT_EVENT.findall(self._tail + data))
        self._record.events += [now] * found
        self._tail = (self._tail + data)[-TAIL:]
        if self._text.endswith(END):
            self._record.ended = now
            self._replay.open.discard(self)
            self._replay.idle[self._port].append(self)

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._replay.open:
            self._replay.open.discard(self)
            self._record.fault = self._record.fault or f"connection lost: {error}"
        elif self in self._replay.idle[self._port]:
            self._replay.idle[self._port].remove(self)

    def give_up(self) -> None:
        """As a client does that waits no longer."""
        self._replay.open.discard(self)
        self._transport.abort()


def body_of(model: str, arrival: Arrival) -> bytes:
    """A chat completion whose prompt has so many tokens, the template's included."""
    return msgspec.json.encode(
        {
            "model": model,
            "stream": True,
            "max_tokens": arrival.answer_tokens,
            "ignore_eos": True,
            "thinking": {"type": "disabled"},
            "messages": [{"role": "user", "content": prompt_of(arrival.session, arrival.prompt_tokens)}],
        }
    )


def check(arrival: Arrival, record: Record, answer: bytes) -> None:
    """Compare an answer that ended with the engine's; note what is missing and what is doubled."""
    if record.ended is None:
        return
    answer = unchunked(answer)
    text = "".join(
        choice["delta"].get("content") or ""
        for event in re.findall(rb"data: (\{.*\})", answer)
        for choice in msgspec.json.decode(event).get("choices", ())
    )
    wanted = expected_words(arrival.session, arrival.prompt_tokens, arrival.answer_tokens)
    got = words_of(text)
    if b"data: [DONE]" not in answer:
        record.fault = f"no end of the answer: {answer[-200:].decode(errors='replace')}"
    if got != wanted:
        record.missing = sum((Counter(wanted) - Counter(got)).values())
        record.doubled = sum((Counter(got) - Counter(wanted)).values())
        if not record.missing and not record.doubled:
            record.fault = "its tokens came in another order."


def unchunked(answer: bytes) -> bytes:
    """The body of a response in chunked transfer coding; a router cuts events where it likes."""
    _, _, rest = answer.partition(b"\r\n\r\n")
    body = bytearray()
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body += rest[:length]
        rest = rest[length + 2 :]
    return bytes(body)


async def main(plan: Path, result: Path) -> None:
    """See module."""
    records = await Replay(msgspec.json.decode(plan.read_bytes(), type=Plan)).run()
    result.write_bytes(msgspec.json.encode(records))


if __name__ == "__main__":
    import uvloop

    go_first(3)  # a client that waits for a core measures that
    uvloop.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
    print("ready", flush=True)
