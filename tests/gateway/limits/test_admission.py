"""Admission: bounds, times to come back, and draining."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from vllm_deepinfer.engine import Load
from vllm_deepinfer.gateway.errors import ApiError
from vllm_deepinfer.gateway.limits import admission as admission_module
from vllm_deepinfer.gateway.limits.admission import ALWAYS_ADMIT, Admission, BusyMeter, runnable_s


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(load: Load | None = None, **options: Any) -> Admission:
    options = {"max_active": 100, "max_waiting": 10} | options
    return Admission(lambda: load or Load(), **options)


def refusal(admission: Admission) -> ApiError:
    with pytest.raises(ApiError) as caught, admission.admit():
        pass
    return caught.value


def test_places_are_given_back_also_after_an_error() -> None:
    admission = make(max_active=1)
    for _ in range(3):
        with pytest.raises(KeyError), admission.admit():
            assert admission.active == 1
            raise KeyError
    assert admission.active == 0


def test_at_most_so_many_in_work() -> None:
    admission = make(max_active=2)
    with admission.admit(), admission.admit():
        error = refusal(admission)
        assert error.status == 429 and "2 requests are in work" in error.message
        assert error.retry_after_s is not None and 1 <= error.retry_after_s <= 30
    with admission.admit():
        pass


@pytest.mark.parametrize(("waiting", "admitted"), [(0, True), (9, True), (10, False), (500, False)])
def test_a_long_queue_in_the_engine_refuses(waiting: int, admitted: bool) -> None:
    admission = make(Load(waiting_requests=waiting))
    if admitted:
        with admission.admit():
            pass
    else:
        assert "wait for the engine" in refusal(admission).message


def test_the_time_to_come_back_follows_how_long_requests_stay() -> None:
    clock = Clock()
    admission = make(max_active=1, clock=clock)
    told = []
    for hold in (0.1, 20.0):
        for _ in range(50):
            with admission.admit():
                clock.now += hold
        with admission.admit():
            told.append(refusal(admission).retry_after_s)
    assert told[0] == 1.0 and told[1] == pytest.approx(10, rel=0.05)


def test_a_busy_thread_refuses_but_never_the_first_few() -> None:
    meter = BusyMeter(lambda: 0.0, lambda: 0.0)
    meter.share = 0.95
    admission = make(max_busy=0.6, meter=meter)
    with ExitStack() as places:
        for _ in range(ALWAYS_ADMIT):
            places.enter_context(admission.admit())
        assert "at its limit" in refusal(admission).message
        meter.share = 0.5
        places.enter_context(admission.admit())
    meter.share = 1.0
    with ExitStack() as places:
        unlimited = make(meter=meter)
        for _ in range(50):
            places.enter_context(unlimited.admit())


def test_the_meter_measures_a_share_of_a_core() -> None:
    wall, cpu = Clock(), Clock()
    meter = BusyMeter(wall, cpu)
    for _ in range(40):
        wall.now += 0.1
        cpu.now += 0.03
        meter.sample()
    assert meter.share == pytest.approx(0.3, abs=1e-4)
    for _ in range(40):
        wall.now += 0.1
        cpu.now += 0.1
        meter.sample()
    assert meter.share == pytest.approx(1.0, abs=1e-4)
    meter.sample()  # no time has passed
    assert meter.share <= 1.0


async def test_the_meter_runs() -> None:
    meter = BusyMeter()
    task = asyncio.create_task(meter.run())
    await asyncio.sleep(0.25)
    task.cancel()
    assert 0 <= meter.share <= 1


async def test_draining_waits_for_what_is_in_work() -> None:
    admission = make()
    with admission.admit():
        draining = asyncio.create_task(admission.drain(5))
        await asyncio.sleep(0)
        error = refusal(admission)
        assert error.status == 503 and error.retry_after_s == 1.0
        assert not draining.done()
    assert await draining is True


async def test_draining_gives_up_in_time() -> None:
    admission = make()
    with admission.admit():
        assert await admission.drain(0.01) is False


async def test_draining_an_idle_gateway_is_immediate() -> None:
    assert await make().drain(0) is True


def test_time_spent_waiting_for_a_core_counts_as_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "schedstat"
    file.write_text("1500000000 500000000 77\n")
    monkeypatch.setattr(admission_module, "SCHEDSTAT", file)
    assert runnable_s() == 2.0
    file.unlink()  # not Linux
    before = time.thread_time()
    assert before <= runnable_s() <= time.thread_time()


def test_the_meter_knows_what_a_request_takes_and_keeps_it() -> None:
    wall, cpu, active = Clock(), Clock(), [20]
    meter = BusyMeter(wall, cpu, lambda: active[0])

    def run(seconds: float, share: float) -> None:
        for _ in range(round(seconds / 0.1)):
            wall.now += 0.1
            cpu.now += 0.1 * share
            meter.sample()

    run(5, 0.4)
    assert meter.per_request == pytest.approx(0.02, rel=1e-3)
    active[0] = 2
    run(0.3, 0.04)  # while they become few, both are averages over the same time
    kept = meter.per_request
    run(60, 0.001)
    assert meter.per_request == pytest.approx(kept, rel=0.5) and meter.per_request > 0.01
    active[0] = 100
    run(10, 0.1)  # lighter ones: learned anew
    assert meter.per_request == pytest.approx(0.001, rel=1e-2)


def test_no_more_are_admitted_than_the_thread_can_carry() -> None:
    meter = BusyMeter(lambda: 0.0, lambda: 0.0)
    meter.per_request = 0.02
    admission = make(max_busy=0.6, meter=meter)  # the share itself is still 0: it is half a second old
    with ExitStack() as places:
        for _ in range(30):
            places.enter_context(admission.admit())
        assert "at its limit" in refusal(admission).message
    meter.per_request = 0.5
    with ExitStack() as places:
        for _ in range(ALWAYS_ADMIT):
            places.enter_context(admission.admit())
        refusal(admission)


@pytest.mark.parametrize("cost", [0.002, 0.01, 0.04])
def test_a_thousand_clients_that_come_again_and_again_end_at_the_bound(cost: float) -> None:
    """Each request in work takes `cost` of the thread; every 10 ms all who are out ask again."""
    wall, cpu = Clock(), Clock()
    admission = make(max_active=2000, max_waiting=2000, max_busy=0.6)
    admission.meter = BusyMeter(wall, cpu, lambda: admission.active)
    places: list[ExitStack] = []
    shares = []
    for tick in range(1000):
        wall.now += 0.01
        demand = admission.active * cost
        cpu.now += 0.01 * min(1.0, demand)
        shares.append(demand)
        if tick % 10 == 9:
            admission.meter.sample()
        for _ in range(-(-len(places) // 20)):  # a twentieth ends, at least one
            places.pop(0).close()
        for _ in range(1000 - len(places)):
            place = ExitStack()
            try:
                place.enter_context(admission.admit())
            except ApiError:
                break
            places.append(place)
    late = shares[500:]
    assert max(late) <= 0.66 and sum(late) / len(late) > 0.4
    for place in places:
        place.close()
