import threading
from array import array
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from vllm_deepinfer.gateway.tokens.errors import TokenizerBusyError
from vllm_deepinfer.gateway.tokens.pool import EncodePool


class Gate:
    """An encoder that records its calls and waits at every text that contains `wait`."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.open = threading.Event()
        self.entered = threading.Semaphore(0)

    def encode(self, text: str) -> list[int]:
        self.seen.append(text)
        if "wait" in text:
            self.entered.release()
            assert self.open.wait(10)
        if "fail" in text:
            raise ValueError(text)
        return [len(text), ord(text[0])]


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def pool(gate: Gate) -> Iterator[EncodePool]:
    pool = EncodePool(gate.encode, threads=1, max_waiting_chars=100)
    yield pool
    gate.open.set()
    pool.close()


def test_ids_come_in_the_order_of_the_pieces() -> None:
    pool = EncodePool(lambda text: [ord(text)], threads=4, max_waiting_chars=1000)
    letters = [chr(code) for code in range(60, 160)]
    assert pool.run(letters).result(10) == [array("I", [code]) for code in range(60, 160)]
    assert pool.waiting_chars == 0
    pool.close()


def test_no_pieces_no_ids(pool: EncodePool) -> None:
    assert pool.run([]).result(1) == []


def test_a_short_prompt_overtakes_a_long_one(pool: EncodePool, gate: Gate) -> None:
    long = pool.run(["wait", "long 1", "long 2", "long 3"])
    assert gate.entered.acquire(timeout=10)
    short = pool.run(["short"])
    gate.open.set()
    short.result(10)
    long.result(10)
    assert gate.seen == ["wait", "short", "long 1", "long 2", "long 3"]


def test_an_error_ends_the_prompt_and_no_other(pool: EncodePool, gate: Gate) -> None:
    bad = pool.run(["a", "fail", "b", "fail"])
    good = pool.run(["c"])
    with pytest.raises(ValueError, match="fail"):
        bad.result(10)
    assert good.result(10) == [array("I", [1, 99])]
    pool.call(lambda: None).result(10)
    assert gate.seen.count("fail") == 1  # nothing is encoded for a prompt that has failed
    assert pool.waiting_chars == 0


def test_cancelling_stops_the_rest(pool: EncodePool, gate: Gate) -> None:
    future = pool.run(["wait", "rest", "rest"])
    assert gate.entered.acquire(timeout=10)
    assert future.cancel()
    gate.open.set()
    pool.run(["next"]).result(10)
    while pool.waiting_chars:  # the cancelled pieces are only counted off
        pool.call(lambda: None).result(10)
    assert gate.seen == ["wait", "next"]


def test_too_much_waiting_text_is_refused(pool: EncodePool, gate: Gate) -> None:
    first = pool.run(["wait" + "x" * 90])
    assert gate.entered.acquire(timeout=10)
    with pytest.raises(TokenizerBusyError, match=r"^94 characters of other prompts"):
        pool.run(["x" * 7])
    assert pool.waiting_chars == 94
    accepted = pool.run(["x" * 6])
    gate.open.set()
    first.result(10)
    accepted.result(10)
    assert pool.run(["x" * 500]).result(10)  # alone, any length is taken


def test_close_cancels_what_waits(gate: Gate) -> None:
    pool = EncodePool(gate.encode, threads=1, max_waiting_chars=100)
    running, waiting = pool.run(["wait", "b"]), pool.run(["c"])
    assert gate.entered.acquire(timeout=10)
    closing = threading.Thread(target=pool.close)
    closing.start()
    for future in (running, waiting):
        with pytest.raises(CancelledError):
            future.result(10)
    gate.open.set()
    closing.join(10)
    assert not closing.is_alive()


def test_threads_share_the_pieces_of_one_prompt() -> None:
    meet = threading.Barrier(2)

    def encode(text: str) -> list[int]:
        meet.wait(10)  # passes only if two threads are inside at once
        return [1]

    pool = EncodePool(encode, threads=2, max_waiting_chars=100)
    assert len(pool.run(["a", "b", "c", "d"]).result(20)) == 4
    pool.close()
