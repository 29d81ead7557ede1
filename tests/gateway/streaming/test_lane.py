"""Lane: the same bytes as ASGI's send, in order, whatever the socket does."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl

from vllm_deepinfer.gateway.streaming.lane import (
    MOST_HEAD_BYTES,
    SCOPE_KEY,
    Lane,
    LaneProtocol,
    chunk_head,
    write_burst,
)
from vllm_deepinfer.gateway.streaming.sse import SseWriter

App = Callable[[Any, Any, Any], Any]


class FakeTransport:
    """Counts what is queued instead of sent."""

    def __init__(self) -> None:
        self.queued: list[bytes] = []
        self.closing = False

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self.queued))

    def write(self, data: bytes) -> None:
        self.queued.append(bytes(data))


class FakeFlow:
    read_paused = write_paused = False

    def resume_reading(self) -> None:
        self.read_paused = False


@pytest.fixture
def pair() -> Any:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    yield ends
    for end in ends:
        end.close()


def lane_on(end: socket.socket) -> tuple[Lane, FakeTransport, FakeFlow]:
    transport, flow = FakeTransport(), FakeFlow()
    return Lane(transport, cast(FlowControl, flow), end.fileno()), transport, flow


def test_a_chunk_goes_straight_to_the_socket(pair: Any) -> None:
    lane, transport, _ = lane_on(pair[0])
    assert lane.write(b"hello, world: 17.")
    assert pair[1].recv(100) == b"11\r\nhello, world: 17.\r\n"
    assert transport.queued == []


def test_what_is_queued_goes_first(pair: Any) -> None:
    lane, transport, _ = lane_on(pair[0])
    transport.queued.append(b"head")
    assert lane.write(b"x")
    assert transport.queued == [b"head", b"1\r\nx\r\n"]


def test_the_rest_of_a_full_socket_is_queued(pair: Any) -> None:
    lane, transport, _ = lane_on(pair[0])
    body = bytes(range(256)) * 8192
    assert lane.write(body)
    assert transport.queued
    sent = b""
    while len(sent) < 2_097_152 - sum(map(len, transport.queued)) + 10:
        try:
            sent += pair[1].recv(1 << 20)
        except BlockingIOError:
            break
    assert sent + b"".join(transport.queued) == b"200000\r\n" + body + b"\r\n"


def test_after_a_full_socket_the_queue_is_looked_at_again(pair: Any) -> None:
    lane, transport, _ = lane_on(pair[0])
    assert lane.write(b"a")
    assert lane.write(bytes(4 << 20)) and transport.queued
    assert lane.write(b"b")
    assert transport.queued[-1] == b"1\r\nb\r\n"
    transport.queued.clear()
    while True:
        try:
            pair[1].recv(1 << 20)
        except BlockingIOError:
            break
    assert lane.write(b"c")
    assert transport.queued == [] and pair[1].recv(100) == b"1\r\nc\r\n"


def test_a_slow_client_is_left_to_asgi(pair: Any) -> None:
    lane, transport, flow = lane_on(pair[0])
    flow.write_paused = True
    transport.queued.append(b"much")
    assert not lane.write(b"x")
    assert transport.queued == [b"much"]


def test_nothing_is_written_to_a_closing_connection(pair: Any) -> None:
    """Its descriptor may be another client's by now."""
    lane, transport, _ = lane_on(pair[0])
    transport.closing = True
    assert lane.write(b"secret")
    with pytest.raises(BlockingIOError):
        pair[1].recv(100)


def test_a_lane_is_quick_while_it_is_watched_clear_and_alive(pair: Any) -> None:
    lane, _, _ = lane_on(pair[0])
    assert lane.write(b"a") and not lane.quick  # nobody would tell it of the end
    lane.watch(lambda: None)
    assert lane.write(b"b") and lane.quick
    lane.unwatch()
    assert not lane.quick
    lane.watch(lambda: None)
    assert lane.write(b"c") and lane.quick
    lane.lost()
    assert not lane.quick


def test_a_lane_behind_queued_bytes_is_not_quick(pair: Any) -> None:
    lane, transport, _ = lane_on(pair[0])
    lane.watch(lambda: None)
    transport.queued.append(b"head")
    assert lane.write(b"a") and not lane.quick
    transport.queued.clear()
    assert lane.write(b"b") and lane.quick
    assert lane.write(bytes(4 << 20)) and not lane.quick


def test_a_burst_is_written_in_order_and_its_rest_queued(pair: Any) -> None:
    lane, transport, _ = lane_on(pair[0])
    lane.quick = True
    whole = bytes(range(256)) * 4096
    write_burst([(lane, b"first"), (lane, whole), (lane, b"last")])
    assert not lane.quick
    received = b""
    while True:
        try:
            received += pair[1].recv(1 << 20)
        except BlockingIOError:
            break
    assert received + b"".join(transport.queued) == b"first" + whole + b"last"


def test_a_burst_to_a_closing_connection_is_dropped(pair: Any) -> None:
    lane, transport, _ = lane_on(pair[0])
    transport.closing = True
    write_burst([(lane, b"secret")])
    assert transport.queued == []
    with pytest.raises(BlockingIOError):
        pair[1].recv(100)


def test_a_burst_to_a_client_that_reset_harms_no_other(pair: Any) -> None:
    lane, _, _ = lane_on(pair[0])
    ends = socket.socketpair()
    gone, _, _ = lane_on(ends[0])
    ends[1].close()
    lane.quick = gone.quick = True
    write_burst([(gone, b"x"), (lane, b"y")])
    assert pair[1].recv(10) == b"y" and not gone.quick
    ends[0].close()


@pytest.mark.parametrize("size", [0, 1, 255, 4095, 4096, 70_000])
def test_chunk_heads_are_hexadecimal(size: int) -> None:
    assert chunk_head(size) == f"{size:x}\r\n".encode()


def test_a_reset_is_left_to_the_transport(pair: Any) -> None:
    lane, transport, _ = lane_on(pair[0])
    pair[1].close()
    assert lane.write(b"x")
    assert transport.queued == [b"1\r\nx\r\n"]


def test_there_is_no_lane_for_http_1_0_or_another_server() -> None:
    lane, _, _ = lane_on(socket.socket())
    assert Lane.open({SCOPE_KEY: lane, "http_version": "1.1"}) is lane
    assert Lane.open({SCOPE_KEY: lane, "http_version": "1.0"}) is None
    assert Lane.open({"http_version": "1.1"}) is None


async def serve(app: App, **options: Any) -> tuple[uvicorn.Server, asyncio.Task[None], int]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="warning", **options))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.002)
    return server, task, server.servers[0].sockets[0].getsockname()[1]


async def get(port: int, version: str = "1.1", times: int = 1) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for last in [False] * (times - 1) + [True]:
        more = "connection: close\r\n" if last else ""
        writer.write(f"GET / HTTP/{version}\r\nhost: x\r\n{more}\r\n".encode())
    answer = await reader.read(-1)
    writer.close()
    return answer


def streaming(lanes: list[Lane | None], bodies: list[bytes]) -> App:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        lane = Lane.open(scope)
        lanes.append(lane)
        writer = SseWriter(send, lane=lane)
        writer.start(200, [(b"content-type", b"text/event-stream")])
        for body in bodies:
            writer.write(body)
            await asyncio.sleep(0)
        await writer.close()

    return app


BODIES = [b"data: %d\n\n" % number for number in range(50)] + [b"data: " + b"x" * 3_000_000 + b"\n\n", b"end"]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_the_client_sees_what_it_would_without_a_lane(loop: str) -> None:
    def whole() -> tuple[bytes, bytes, list[Lane | None]]:
        async def both() -> tuple[bytes, bytes, list[Lane | None]]:
            lanes: list[Lane | None] = []
            answers = []
            for protocol in (LaneProtocol, "httptools"):
                server, task, port = await serve(streaming(lanes, BODIES), http=protocol)
                answers.append(await get(port, times=3))
                server.should_exit = True
                await task
            return answers[0], answers[1], lanes

        return _run(loop, both())

    with_lane, without, lanes = await asyncio.to_thread(whole)
    assert [lane is not None for lane in lanes] == [True] * 3 + [False] * 3
    assert dechunked(with_lane) == dechunked(without) == [b"".join(BODIES)] * 3


def _run(loop: str, main: Any) -> Any:
    if loop == "asyncio":
        return asyncio.run(main)
    uvloop = pytest.importorskip("uvloop")
    return uvloop.run(main)


def dechunked(answer: bytes) -> list[bytes]:
    """The bodies of pipelined answers in chunked transfer coding."""
    bodies = []
    while answer:
        head, answer = answer.split(b"\r\n\r\n", 1)
        assert b"transfer-encoding: chunked" in head
        parts = []
        while True:
            size, answer = answer.split(b"\r\n", 1)
            length = int(size, 16)
            parts.append(answer[:length])
            assert answer[length : length + 2] == b"\r\n"
            answer = answer[length + 2 :]
            if not length:
                break
        bodies.append(b"".join(parts))
    return bodies


def test_a_watcher_hears_of_the_end_once_it_watches_and_not_after(pair: Any) -> None:
    transport = FakeTransport()
    watched: set[Lane] = set()
    heard: list[int] = []
    lane = Lane(transport, cast(FlowControl, FakeFlow()), pair[0].fileno(), watched)
    lane.lost()
    lane.watch(lambda: heard.append(1))
    assert watched == {lane} and heard == []
    lane.lost()
    assert heard == [1]
    lane.unwatch()
    lane.unwatch()
    lane.lost()
    assert watched == set() and heard == [1]


def test_who_watches_too_late_hears_at_once(pair: Any) -> None:
    lane, transport, _ = lane_on(pair[0])
    transport.closing = True
    heard: list[int] = []
    lane.watch(lambda: heard.append(1))
    assert heard == [1]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_the_watchers_of_a_connection_hear_of_its_end(loop: str) -> None:
    async def main() -> None:
        gone, begun = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            lane = Lane.open(scope)
            assert lane is not None
            lane.watch(gone.set)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            begun.set()
            await gone.wait()
            lane.unwatch()

        server, task, port = await serve(app, http=LaneProtocol)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(begun.wait(), 10)
        assert not gone.is_set()
        writer.close()
        await asyncio.wait_for(gone.wait(), 10)
        server.should_exit = True
        await task

    await asyncio.to_thread(_run, loop, main())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_a_whole_request_begins_at_once_and_others_in_a_task(loop: str) -> None:
    """On the paths of generation; before the loop's next turn there is no current task."""

    async def main() -> None:
        begun: list[tuple[str, bool]] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            begun.append((scope["path"], asyncio.current_task() is None))
            message = await receive()
            await asyncio.sleep(0)
            assert asyncio.current_task() is not None
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": message["body"] * 2, "more_body": False})

        server, task, port = await serve(app, http=LaneProtocol)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        paths = ("/v1/messages", "/health", "/v1/messages", "/v1/responses")
        for path in paths:  # the last two at once: the second of them waits for the first
            writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc" % path.encode())
            if path != paths[2]:
                await asyncio.wait_for(reader.readuntil(b"6\r\nabcabc\r\n0\r\n\r\n"), 10)
        await asyncio.wait_for(reader.readuntil(b"6\r\nabcabc\r\n0\r\n\r\n"), 10)
        writer.write(b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nab")
        await asyncio.sleep(0.05)
        assert len(begun) == 5  # it may be refused by its head
        writer.write(b"c")
        await asyncio.wait_for(reader.readuntil(b"6\r\nabcabc\r\n0\r\n\r\n"), 10)
        assert begun == [
            ("/v1/messages", True),
            ("/health", False),
            ("/v1/messages", True),
            ("/v1/responses", False),
            ("/v1/messages", False),
        ]
        writer.close()
        server.should_exit = True
        await task

    await asyncio.to_thread(_run, loop, main())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("piece", [b"x-a: b\r\n" * 500, b"a" * 4000], ids=["many headers", "a long one"])
async def test_a_head_without_end_is_refused(loop: str, piece: bytes) -> None:
    async def main() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"fine"})

        server, task, port = await serve(app, http=LaneProtocol)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")  # an earlier one on the same connection
        assert b"200" in await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 10)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nx-b: ")
        reading, sent = asyncio.ensure_future(reader.readuntil(b"\r\n\r\n")), 0
        while not reading.done() and sent < 4 * MOST_HEAD_BYTES:
            writer.write(piece)
            sent += len(piece)
            await asyncio.sleep(0.002)
        answer = await asyncio.wait_for(reading, 10)
        assert answer.startswith(b"HTTP/1.1 431 ") and b"connection: close" in answer
        writer.close()
        server.should_exit = True
        await task

    await asyncio.to_thread(_run, loop, main())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: x\r\n"])
async def test_a_head_that_never_ends_is_not_waited_for(
    loop: str, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_deepinfer.gateway.streaming.lane.HEAD_S", 0.2)

    async def main() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await asyncio.sleep(0.5)  # longer than a head may take
            await send({"type": "http.response.body", "body": b"answer"})

        server, task, port = await serve(app, http=LaneProtocol)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 408 ")
        writer.close()
        # The head of a second request may be late while the answer to the first one is under way.
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + sent)
        assert b"answer" in await asyncio.wait_for(reader.readuntil(b"answer"), 10)
        writer.close()
        server.should_exit = True
        await task

    await asyncio.to_thread(_run, loop, main())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_a_body_is_no_head(loop: str) -> None:
    async def main() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            size, more = 0, True
            while more:
                message = await receive()
                size, more = size + len(message["body"]), message["more_body"]
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"%d" % size})

        server, task, port = await serve(app, http=LaneProtocol)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b"x" * (3 * MOST_HEAD_BYTES)
        for _ in range(3):
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            answer = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 10)
            assert b"200 OK" in answer and b"%d" % len(body) in answer
        writer.close()
        server.should_exit = True
        await task

    await asyncio.to_thread(_run, loop, main())
