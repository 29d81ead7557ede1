"""StepHub: one sink, many receivers, and faults that stay where they are."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable, Iterator
from typing import Any, cast

import pytest

from vllm_deepinfer.engine import Engine, FinishReason, TokenDelta
from vllm_deepinfer.gateway.metrics import GatewayMetrics
from vllm_deepinfer.gateway.streaming.hub import SLICE, StepHub
from vllm_deepinfer.gateway.streaming.lane import Lane


class FakeEngine:
    """Records aborts."""

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.fail = False

    async def abort(self, request_ids: Iterable[str]) -> None:
        if self.fail:
            raise RuntimeError("no")
        self.aborted += request_ids


class Listener:
    """A receiver that records."""

    def __init__(self, request_id: str, done_after: int = 99, raises: bool = False) -> None:
        self.request_id = request_id
        self.deltas: list[TokenDelta] = []
        self.times: list[float] = []
        self.errors: list[Exception] = []
        self._done_after = done_after
        self._raises = raises

    lane: Lane | None = None

    def quick(self, delta: TokenDelta, now: float) -> bytes | None:
        return None

    def deliver(self, delta: TokenDelta, now: float) -> bool:
        if self._raises:
            raise ValueError("broken stream")
        self.deltas.append(delta)
        self.times.append(now)
        return len(self.deltas) >= self._done_after

    def broken(self, error: Exception) -> None:
        self.errors.append(error)


def make() -> tuple[StepHub, FakeEngine, GatewayMetrics]:
    engine, metrics = FakeEngine(), GatewayMetrics()
    ticks: Any = iter(range(1000))
    return StepHub(cast(Engine, engine), metrics, lambda: float(next(ticks))), engine, metrics


async def test_deltas_reach_their_receiver_with_one_time_per_step() -> None:
    hub, engine, _ = make()
    a, b = Listener("a"), Listener("b")
    hub.add(a)
    hub.add(b)
    hub.sink(
        [TokenDelta("a", (1,)), TokenDelta("b", (2,)), TokenDelta("unknown", (3,)), TokenDelta("a", (4,))]
    )
    hub.sink([TokenDelta("b", (5,))])
    assert [d.token_ids for d in a.deltas] == [(1,), (4,)] and a.times == [0.0, 0.0]
    assert [d.token_ids for d in b.deltas] == [(2,), (5,)] and b.times == [0.0, 1.0]
    await asyncio.sleep(0)
    assert engine.aborted == []


async def test_a_final_delta_ends_the_registration() -> None:
    hub, engine, _ = make()
    a = Listener("a")
    hub.add(a)
    hub.sink([TokenDelta("a", (1,), FinishReason.STOP)])
    hub.sink([TokenDelta("a", (2,))])
    await asyncio.sleep(0)
    assert len(a.deltas) == 1 and len(hub) == 0 and engine.aborted == []


async def test_a_receiver_that_has_enough_is_aborted_in_the_engine() -> None:
    hub, engine, _ = make()
    hub.add(Listener("a", done_after=1))
    hub.add(Listener("b", done_after=1))
    hub.sink([TokenDelta("a", (1,)), TokenDelta("b", (1,))])
    assert engine.aborted == []  # not from inside the engine's step
    await asyncio.sleep(0)
    assert engine.aborted == ["a", "b"]


async def test_an_error_in_one_stream_ends_only_that_one() -> None:
    hub, engine, _ = make()
    bad, good = Listener("bad", raises=True), Listener("good")
    hub.add(bad)
    hub.add(good)
    hub.sink([TokenDelta("bad", (1,)), TokenDelta("good", (2,))])
    await asyncio.sleep(0)
    assert [str(error) for error in bad.errors] == ["broken stream"]
    assert len(good.deltas) == 1 and engine.aborted == ["bad"]


async def test_abort_forgets_at_once() -> None:
    hub, engine, _ = make()
    a = Listener("a")
    hub.add(a)
    hub.abort(["a"])
    hub.sink([TokenDelta("a", (1,))])
    await asyncio.sleep(0)
    assert a.deltas == [] and engine.aborted == ["a"]


async def test_abort_all_lets_the_engine_end_them() -> None:
    hub, engine, _ = make()
    a = Listener("a")
    hub.add(a)
    await hub.abort_all()
    hub.sink([TokenDelta("a", (), FinishReason.ABORT)])
    assert engine.aborted == ["a"] and a.deltas[0].finish_reason is FinishReason.ABORT


async def test_a_failing_abort_is_counted() -> None:
    hub, engine, metrics = make()
    engine.fail = True
    hub.abort(["a"])
    await asyncio.sleep(0.01)
    assert metrics.registry.get_sample_value("deepinfer_gateway_failures_total", {"reason": "abort"}) == 1


async def test_first_tokens_go_out_first() -> None:
    hub, _, _ = make()
    order: list[str] = []

    class Noting(Listener):
        def deliver(self, delta: TokenDelta, now: float) -> bool:
            order.append(f"{delta.request_id}{delta.token_ids[0]}")
            return False

    hub.add(Noting("a"))
    hub.add(Noting("b"))
    hub.sink([TokenDelta("b", [1]), TokenDelta("a", [1])])
    hub.add(Noting("c"))
    hub.add(Noting("d"))
    hub.sink([TokenDelta("a", [2]), TokenDelta("c", [1]), TokenDelta("b", [2]), TokenDelta("c", [2])])
    hub.sink([TokenDelta("a", [3]), TokenDelta("d", [1]), TokenDelta("c", [3])])
    hub.sink([TokenDelta("a", [4]), TokenDelta("d", [2])])
    assert order == ["b1", "a1", "c1", "c2", "a2", "b2", "d1", "a3", "c3", "a4", "d2"]


async def test_what_was_removed_before_its_first_token_is_forgotten() -> None:
    hub, _, _ = make()
    hub.add(Listener("a"))
    hub.remove(["a"])
    hub.sink([TokenDelta("a", [1])])
    assert len(hub) == 0
    assert not hub._fresh


async def test_between_the_slices_of_a_large_step_the_event_loop_has_a_turn() -> None:
    hub, _, _ = make()
    listeners = [Listener(str(number)) for number in range(3 * SLICE)]
    for listener in listeners:
        hub.add(listener)
    hub.sink([TokenDelta(listener.request_id, (1,)) for listener in listeners])
    served = [sum(len(listener.deltas) for listener in listeners)]
    for _ in range(3):
        await asyncio.sleep(0)
        served.append(sum(len(listener.deltas) for listener in listeners))
    assert served == [SLICE, 2 * SLICE, 3 * SLICE, 3 * SLICE]
    assert {time for listener in listeners for time in listener.times} == {0.0}  # one time per step


async def test_a_step_waits_for_the_slices_of_the_one_before_it() -> None:
    """Whatever comes next, the tokens of a stream stay in order, and none is lost or doubled."""
    hub, _, _ = make()
    listeners = [Listener(str(number)) for number in range(2 * SLICE + 1)]
    for listener in listeners:
        hub.add(listener)
    for step in range(3):
        hub.sink([TokenDelta(listener.request_id, (step,)) for listener in listeners])
    hub.sink([TokenDelta(listeners[-1].request_id, (), FinishReason.ABORT)])
    assert [d.token_ids for d in listeners[-1].deltas] == [(0,), (1,), (2,), ()]
    for _ in range(8):
        await asyncio.sleep(0)
    assert all([d.token_ids for d in one.deltas] == [(0,), (1,), (2,)] for one in listeners[:-1])


async def test_frames_are_written_in_a_burst_and_in_order(burst_pair: tuple[Lane, socket.socket]) -> None:
    """Also where a delta of the same stream in between takes the slow path."""
    lane, other_end = burst_pair

    class Quick(Listener):
        def quick(self, delta: TokenDelta, now: float) -> bytes | None:
            return b"%d;" % delta.token_ids[0] if delta.token_ids[0] < 100 else None

        def deliver(self, delta: TokenDelta, now: float) -> bool:
            os.write(lane.fd, b"[%d]" % delta.token_ids[0])
            return False

    hub, _, _ = make()
    receiver = Quick("a")
    receiver.lane = lane
    hub.add(receiver)
    hub.sink([TokenDelta("a", (token,)) for token in (1, 2, 100, 3, 101, 102, 4)])
    assert other_end.recv(100) == b"1;2;[100]3;[101][102]4;"


async def test_a_receiver_whose_quick_way_raises_takes_the_slow_one() -> None:
    class Broken(Listener):
        def quick(self, delta: TokenDelta, now: float) -> bytes | None:
            raise ValueError

    hub, _, _ = make()
    broken, well = Broken("a"), Listener("b")
    hub.add(broken)
    hub.add(well)
    hub.sink([TokenDelta("a", (1,)), TokenDelta("b", (2,))])
    assert len(broken.deltas) == len(well.deltas) == 1


@pytest.fixture
def burst_pair() -> Iterator[tuple[Lane, socket.socket]]:
    ours, theirs = socket.socketpair()
    lane = Lane(None, cast(Any, None), ours.fileno())
    lane.quick = True
    with ours, theirs:
        yield lane, theirs
