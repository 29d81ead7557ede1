"""The client against a server that answers as simulated engines do, or not quite."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from vllm_deepinfer.bench.routing.client import Connection, Plan, Record, Replay, body_of, check, unchunked
from vllm_deepinfer.bench.routing.trace import Arrival
from vllm_deepinfer.bench.routing.words import expected_words, prompt_ids

Answer = Callable[[list[int]], list[bytes]]
ARRIVAL = Arrival(0.0, prompt_tokens=60, answer_tokens=20, session=2)


def event(text: str) -> bytes:
    body = f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': text}}]})}\n\n".encode()
    return body.replace(b'"content": ', b'"content":')


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = chunk(event("")) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def whole(words: list[int]) -> list[bytes]:
    return [HEAD, *(chunk(event(f" w{word};")) for word in words), END]


class Server:
    """Answers each request with the pieces that `answer` makes of the right words, a packet each."""

    def __init__(self, answer: Answer, pause_s: float = 0.005) -> None:
        self._answer, self._pause_s = answer, pause_s
        self.connections = 0
        self.bodies: list[dict[str, object]] = []

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.bodies.append(json.loads(await reader.readexactly(length)))
                words = expected_words(ARRIVAL.session, ARRIVAL.prompt_tokens, ARRIVAL.answer_tokens)
                for piece in self._answer(words):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(self._pause_s)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def replayed(answer: Answer, arrivals: list[Arrival], patience_s: float = 5.0) -> list[Record]:
    server = Server(answer)
    port = await server.start()
    return await Replay(Plan([port], "bench", arrivals, patience_s)).run()


async def test_a_whole_answer_has_an_event_per_token_and_nothing_wrong() -> None:
    [record] = await replayed(whole, [ARRIVAL])
    words = expected_words(2, 60, 20)
    assert len(record.events) == len(words)
    assert record.ended is not None and record.ended >= record.events[-1] > record.events[0] > record.sent
    assert (record.fault, record.missing, record.doubled) == ("", 0, 0)


async def test_events_are_counted_once_wherever_the_packets_are_cut() -> None:
    def cut(size: int) -> Answer:
        def pieces(words: list[int]) -> list[bytes]:
            data = b"".join(whole(words)[1:])
            return [HEAD, *(data[i : i + size] for i in range(0, len(data), size))]

        return pieces

    for size in (7, 11, 12, 50, 5000):
        server = Server(cut(size), pause_s=0)
        [record] = await Replay(Plan([await server.start()], "bench", [ARRIVAL], 5.0)).run()
        assert len(record.events) == len(expected_words(2, 60, 20)), size
        assert (record.fault, record.missing, record.doubled) == ("", 0, 0)


async def test_events_may_be_cut_by_chunks() -> None:
    def pieces(words: list[int]) -> list[bytes]:
        body = b"".join(event(f" w{word};") for word in words) + event("") + b"data: [DONE]\n\n"
        return [HEAD, *(chunk(body[i : i + 33]) for i in range(0, len(body), 33)), b"0\r\n\r\n"]

    [record] = await replayed(pieces, [ARRIVAL])
    assert (record.fault, record.missing, record.doubled) == ("", 0, 0)


def test_a_body_is_put_together_from_its_chunks() -> None:
    assert unchunked(b"HTTP/1.1 200 OK\r\nx: y\r\n\r\n3\r\nabc\r\n10\r\n0123456789abcdef\r\n0\r\n\r\n") == (
        b"abc0123456789abcdef"
    )


async def test_missing_and_doubled_tokens_are_found() -> None:
    [record] = await replayed(lambda words: whole(words[1:]), [ARRIVAL])
    assert (record.missing, record.doubled) == (1, 0)
    [record] = await replayed(lambda words: whole([*words, words[-1]]), [ARRIVAL])
    assert (record.missing, record.doubled) == (0, 1)
    [record] = await replayed(lambda words: whole([words[1], words[0], *words[2:]]), [ARRIVAL])
    assert (record.missing, record.doubled) == (0, 0)
    assert "another order" in record.fault


async def test_a_refusal_is_a_fault_with_what_the_server_said() -> None:
    refusal = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}"
    [record] = await replayed(lambda words: [refusal], [ARRIVAL])
    assert record.fault.startswith("HTTP/1.1 429")
    assert record.ended is None


async def test_an_answer_that_stops_without_its_end_is_a_fault() -> None:
    [record] = await replayed(lambda words: [*whole(words)[:-1], b"0\r\n\r\n"], [ARRIVAL])
    assert "no end of the answer" in record.fault


async def test_what_takes_too_long_is_given_up_and_is_no_fault() -> None:
    async def slow() -> list[Record]:
        server = Server(lambda words: whole(words)[:5], pause_s=0.01)
        return await Replay(Plan([await server.start()], "bench", [ARRIVAL], 0.3)).run()

    [record] = await slow()
    assert record.ended is None and record.fault == ""
    assert len(record.events) <= 4


async def test_no_request_is_sent_before_its_time_and_connections_used_again() -> None:
    server = Server(whole, pause_s=0)
    port = await server.start()
    arrivals = [
        Arrival(at, ARRIVAL.prompt_tokens, ARRIVAL.answer_tokens, ARRIVAL.session) for at in (0.0, 0.0, 1.5)
    ]
    records = await Replay(Plan([port], "bench", arrivals, 5.0)).run()
    assert all(record.sent >= arrival.at for record, arrival in zip(records, arrivals, strict=True))
    assert server.connections == 2
    assert server.bodies[0]["max_tokens"] == 20 and server.bodies[0]["stream"] is True


async def test_several_front_doors_take_turns() -> None:
    servers = [Server(whole, pause_s=0), Server(whole, pause_s=0)]
    ports = [await server.start() for server in servers]
    await Replay(Plan(ports, "bench", [ARRIVAL] * 4, 5.0)).run()
    assert [len(server.bodies) for server in servers] == [2, 2]


def test_the_prompt_is_the_one_that_the_answer_is_checked_against() -> None:
    content = json.loads(body_of("bench", ARRIVAL))["messages"][0]["content"]
    assert len(content) + 4 == len(prompt_ids(ARRIVAL.session, ARRIVAL.prompt_tokens)) == 60


def test_an_answer_that_did_not_end_is_not_checked() -> None:
    record = Record(0.0)
    check(ARRIVAL, record, b"")
    assert record == Record(0.0)


def test_a_connection_that_breaks_while_idle_is_forgotten() -> None:
    replay = Replay(Plan([1], "bench", [], 0.0))
    connection = Connection(replay, 1)
    replay.idle[1].append(connection)
    connection.connection_lost(None)
    assert replay.idle[1] == []
