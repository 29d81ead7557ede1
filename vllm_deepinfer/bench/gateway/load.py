"""Streaming load, a process of its own: `python -m … PORT STREAMS TOKENS SPREAD_S ANSWERS`.

Every stream asks for an answer, reads it to its end, and asks again on the same connection, ANSWERS
times. With 0 it goes on until told to stop, and the first answers are of all lengths up to TOKENS, so that
from then on answers end and begin evenly. A read costs a few microseconds, so that the load's core is not
the bottleneck. Commands on stdin: `sample` prints the events and answers read so far, `first` the (id, sent,
first event) of the answers begun since the last time, in monotonic seconds, `stop` lets the running answers
end and prints what `sample` does.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from functools import partial
from typing import Any, cast

from vllm_deepinfer.bench.gateway.lines import go_first, serve_lines

END = b"0\r\n\r\n"
EVENT = b"data: {"
ENDLESS = 1 << 60
PROBES = 8  # so few streams are a probe
RETRY_S = 2.0  # after 429


def request(port: int, tokens: int) -> bytes:
    """A chat completion that streams `tokens` tokens."""
    body = json.dumps(
        {
            "model": "bench",
            "stream": True,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "thinking": {"type": "disabled"},
            "messages": [{"role": "user", "content": "Write a long story about a lighthouse. " * 4}],
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    )
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class Load:
    """All streams and what they have seen."""

    def __init__(self, port: int, tokens: int, answers: int) -> None:
        self.port = port
        self.tokens = tokens
        self.most = answers or ENDLESS
        self.staggered = not answers
        self.request = request(port, tokens)
        self.events = 0
        self.answers = 0
        self.refused = 0
        self.errors: list[str] = []
        self.first: list[tuple[str, float, float]] = []
        self.stopping = False
        self._opening: set[asyncio.Future[Any]] = set()

    async def open(self, streams: int, spread_s: float) -> None:
        """Connect; requests begin evenly over `spread_s`."""
        loop = asyncio.get_running_loop()
        for number in range(streams):
            first = self.request
            if self.staggered:
                first = request(self.port, 1 + number * self.tokens // streams)
            await loop.create_connection(partial(Stream, self, self.most, first), "127.0.0.1", self.port)
            await asyncio.sleep(spread_s / streams)

    def reconnect(self, answers: int) -> None:
        """Ask for the rest of a stream's answers on a new connection."""
        opening = asyncio.get_running_loop().create_connection(
            lambda: Stream(self, answers), "127.0.0.1", self.port
        )
        task = asyncio.ensure_future(opening)
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def sample(self) -> str:
        """Totals as JSON."""
        return json.dumps(
            {
                "events": self.events,
                "answers": self.answers,
                "refused": self.refused,
                "errors": len(self.errors),
            }
        )

    def first_errors(self) -> str:
        """Some of the errors, as JSON."""
        return json.dumps(self.errors[:3])

    def take_first(self) -> str:
        """See module."""
        first, self.first = self.first, []
        return json.dumps(first)

    def stop(self) -> str:
        """Ask for nothing more."""
        self.stopping = True
        return self.sample()


class Stream(asyncio.Protocol):
    """One connection: ask, read to the end, ask again."""

    def __init__(self, load: Load, answers: int, first: bytes | None = None) -> None:
        self._load = load
        self._request = first or load.request
        self._sent = 0.0
        self._waiting = True
        self._tail = b""
        self._left = answers
        self._asking = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self._ask()

    def _ask(self) -> None:
        if self._load.stopping or not self._left:
            return
        if self._transport.is_closing():  # idle for too long, after a refusal
            self._load.reconnect(self._left)
            return
        self._asking = self._waiting = True
        self._sent = time.monotonic()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        load = self._load
        data = self._tail + data
        if self._waiting and not self._begin(data):
            return
        load.events += data.count(EVENT)
        self._tail = data[1 - len(EVENT) :]  # too short to hold an event, long enough to hold END
        if data.endswith(END):
            self._tail = b""
            self._request = load.request
            self._asking = False
            load.answers += 1
            self._left -= 1
            self._ask()

    def _begin(self, data: bytes) -> bool:
        """Whether the first event of an answer is here; a refusal is dealt with."""
        self._tail = data
        if data.startswith(b"HTTP/1.1 ") and len(data) > 12 and not data.startswith(b"HTTP/1.1 200"):
            self._refused(data)
            return False
        found = data.find(b'"id":"')
        end = data.find(b'"', found + 6)
        if found < 0 or end < 0:
            return False
        self._waiting = False
        self._load.first.append((data[found + 6 : end].decode(), self._sent, time.monotonic()))
        return True

    def _refused(self, data: bytes) -> None:
        self._tail = b""
        self._asking = False
        if data.startswith(b"HTTP/1.1 429"):
            self._load.refused += 1
            asyncio.get_running_loop().call_later(RETRY_S, self._ask)
        else:
            self._load.errors.append(data[:300].decode(errors="replace"))

    def connection_lost(self, error: Exception | None) -> None:
        if self._asking and not self._load.stopping:  # idle connections may be closed
            self._load.errors.append(f"connection lost: {error}")


async def main(port: int, streams: int, tokens: int, spread_s: float, answers: int) -> None:
    """Serve commands until stdin ends."""
    load = Load(port, tokens, answers)
    opening = asyncio.create_task(load.open(streams, spread_s))
    commands = {"sample": load.sample, "errors": load.first_errors, "first": load.take_first}
    await serve_lines(commands | {"stop": load.stop})
    opening.cancel()


if __name__ == "__main__":
    import uvloop

    port, streams, tokens, spread_s, answers = sys.argv[1:]
    if int(streams) <= PROBES:  # a probe must not wait for the load beside it, or it measures that
        go_first(2)
    uvloop.run(main(int(port), int(streams), int(tokens), float(spread_s), int(answers)))
