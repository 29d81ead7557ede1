"""The engine's side of a front-door benchmark, a process of its own: `python -m … SOCKET PORT OPTIONS`.

One SimulatedEngine, offered in two ways: as a token channel (ChannelEngine), and as an OpenAI-like streaming
server, which is what a router forwards to. Same engine, same step times, same tokens. It notes when a request
arrived and when its first token left, so that what the front door adds can be told from the engine's own
time.

It reads commands from stdin, one per line: `records` prints the notes since the last time as JSON.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
import zlib
from collections.abc import Sequence
from typing import cast

import msgspec

from vllm_deepinfer.bench.gateway.channel import Abort, Command, Frames, Step, Submit
from vllm_deepinfer.bench.gateway.lines import go_first, serve_lines
from vllm_deepinfer.engine import GenerateRequest, SamplingParams, TokenDelta
from vllm_deepinfer.engine.simulated import SimulatedConfig, SimulatedEngine
from vllm_deepinfer.engine.simulated.tokens import TokenAt
from vllm_deepinfer.policy.step_cost import StepCost


class Options(msgspec.Struct, frozen=True):
    """What to simulate; given as JSON.

    Attributes: `words` are token ids and their texts; answers are cut from them, round and round.
    """

    step_ms: float
    words: list[tuple[int, str]]
    max_num_seqs: int = 256


class Upstream:
    """One engine, its records, and its servers."""

    def __init__(self, options: Options) -> None:
        self.words = options.words
        self.records: dict[str, list[float]] = {}
        config = SimulatedConfig(
            cost=StepCost(per_step=options.step_ms / 1000, per_token=0.0),
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=1 << 20,
            kv_capacity_tokens=1 << 24,
        )
        self.engine = SimulatedEngine(config, tokens=self._answer)

    def _answer(self, request: GenerateRequest) -> TokenAt:
        words, start = self.words, zlib.crc32(request.request_id.encode())  # every answer begins elsewhere
        return lambda position: words[(start + position) % len(words)][0]

    def arrived(self, request_id: str) -> None:
        """A request is here."""
        self.records[request_id] = [time.monotonic()]

    def left(self, deltas: Sequence[TokenDelta]) -> None:
        """These are sent now: call it right before the write, else what an engine's server takes to write all
        streams of a step would count as added by the front door.
        """
        now = time.monotonic()
        for delta in deltas:
            record = self.records.get(delta.request_id)
            if record is not None and len(record) == 1 and delta.token_ids:
                record.append(now)

    def take_records(self) -> str:
        """Arrival and first token of every request since the last time, in monotonic seconds, as JSON."""
        whole = {name: record for name, record in self.records.items() if len(record) == 2}
        for name in whole:
            del self.records[name]
        return json.dumps(whole)


class TokenChannel:
    """Serves one ChannelEngine."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._decode = msgspec.msgpack.Decoder(Command).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._tasks: set[asyncio.Task[None]] = set()
        self.frames = Frames(self._received, lambda: None)

    def _received(self, message: memoryview) -> None:
        command = self._decode(message)
        engine = self._upstream.engine
        if isinstance(command, Submit):
            self._upstream.arrived(command.request.request_id)
            task = asyncio.create_task(engine.submit(command.request, self._sink))
        else:
            assert isinstance(command, Abort)
            task = asyncio.create_task(engine.abort(command.request_ids))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _sink(self, deltas: Sequence[TokenDelta]) -> None:
        message = self._encode(Step(deltas, self._upstream.engine.load()))
        self._upstream.left(deltas)
        self.frames.send(message)


HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')


def chunk(text: str) -> bytes:
    """One event in chunked transfer coding."""
    event = f"data: {text}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(event), event)


class HttpStreams:
    """The OpenAI-like server: one sink for all streams, no task per stream."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.connections: dict[str, HttpStream] = {}
        self.texts = {token: json.dumps(text, ensure_ascii=False)[1:-1] for token, text in upstream.words}
        self.count = 0

    def sink(self, deltas: Sequence[TokenDelta]) -> None:
        """Write each delta to its connection, in vLLM's form."""
        for delta in deltas:
            connection = self.connections.get(delta.request_id)
            if connection is None:
                continue
            text = "".join(self.texts[token] for token in delta.token_ids)
            reason = f'"{delta.finish_reason}"' if delta.finish_reason else "null"
            body = chunk(
                f'{{"id":"{delta.request_id}","object":"chat.completion.chunk","created":1790000000,"model":'
                f'"bench","choices":[{{"index":0,"delta":{{"content":"{text}"}},"logprobs":null,'
                f'"finish_reason":{reason},"token_ids":null}}]}}'
            )
            if delta.finish_reason:
                del self.connections[delta.request_id]
                body += chunk("[DONE]") + b"0\r\n\r\n"
            self.upstream.left((delta,))
            connection.write(body)


class HttpStream(asyncio.Protocol):
    """One keep-alive connection; one request at a time."""

    def __init__(self, streams: HttpStreams) -> None:
        self._streams = streams
        self._data = b""
        self._request_id = ""
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.write = cast(asyncio.Transport, transport).write

    def data_received(self, data: bytes) -> None:
        self._data += data
        head = self._data.find(b"\r\n\r\n")
        if head < 0:
            return
        length = _LENGTH.search(self._data, 0, head)
        end = head + 4 + (int(length[1]) if length else 0)
        if len(self._data) < end:
            return
        request, self._data = self._data[:end], self._data[end:]
        if request.startswith(b"POST"):
            self._begin(request)
        else:
            self.write(OK)

    def _begin(self, request: bytes) -> None:
        streams = self._streams
        streams.count += 1
        self._request_id = f"up-{streams.count}"
        streams.connections[self._request_id] = self
        streams.upstream.arrived(self._request_id)
        limit = _TOKENS.search(request)
        sampling = SamplingParams(max_tokens=int(limit[1]) if limit else 16, ignore_eos=True)
        generate = GenerateRequest(request_id=self._request_id, prompt_token_ids=[1] * 16, sampling=sampling)
        self.write(HEAD)
        self._task = asyncio.create_task(streams.upstream.engine.submit(generate, streams.sink))

    def connection_lost(self, error: Exception | None) -> None:
        if self._streams.connections.pop(self._request_id, None) is not None:
            self._task = asyncio.create_task(self._streams.upstream.engine.abort([self._request_id]))


async def main(socket: str, port: int, options: Options) -> None:
    """Serve until stdin ends."""
    upstream = Upstream(options)
    await upstream.engine.start()
    streams = HttpStreams(upstream)
    loop = asyncio.get_running_loop()
    servers = [  # kept: uvloop closes a server that nobody holds
        await loop.create_unix_server(lambda: TokenChannel(upstream).frames, socket),
        await loop.create_server(lambda: HttpStream(streams), "127.0.0.1", port, backlog=2048),
    ]
    await serve_lines({"records": upstream.take_records})
    del servers


if __name__ == "__main__":
    import uvloop

    go_first(1)  # an engine does not wait for the clients that read its tokens
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=Options)))
