"""Workers: deadlines, hung threads, refusals."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from vllm_deepinfer.store.errors import StoreUnavailable
from vllm_deepinfer.store.workers import Job, Workers


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hangs in a test hangs on this, and comes back at its end."""
    event = threading.Event()
    yield event
    event.set()


def square(number: int, job: Job) -> int:
    return number * number


def test_results_and_errors_come_back() -> None:
    workers = Workers(2)
    assert workers.call(lambda job: 7, 10) == 7
    with pytest.raises(KeyError, match="x"):
        workers.call(lambda job: os.environ.pop("x"), 10)
    assert [workers.call(partial(square, i), 10) for i in range(50)] == [i * i for i in range(50)]
    assert workers.drain(10)


def test_notify_follows_in_order() -> None:
    workers, seen = Workers(1), list[object]()
    done = threading.Event()

    def note(job: Job) -> None:
        seen.append(type(job.error) if job.error else job.result)
        if len(seen) == 2:
            done.set()

    workers.submit(lambda job: 1, note)
    workers.submit(lambda job: 1 / 0, note)
    assert done.wait(10)
    assert seen == [1, ZeroDivisionError]


def test_a_hung_call_is_given_up_and_others_go_on(gate: threading.Event) -> None:
    workers = Workers(2)
    with pytest.raises(StoreUnavailable, match=r"not answered within 0\.01 s"):
        workers.call(lambda job: gate.wait(), 0.01)
    assert workers.hung == 1
    assert [workers.call(partial(square, i), 10) for i in range(20)] == [i * i for i in range(20)]


def test_as_many_hung_as_workers_refuse_at_once_and_heal(gate: threading.Event) -> None:
    workers = Workers(2)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="within"):
            workers.call(lambda job: gate.wait(), 0.01)
    with pytest.raises(StoreUnavailable, match="2 calls into the store hang"):
        workers.submit(lambda job: 1)
    assert threading.active_count() < 30
    gate.set()
    for _ in range(1_000):
        if not workers.hung:
            break
        threading.Event().wait(0.005)
    assert workers.call(lambda job: "back", 10) == "back"


def test_a_job_that_waits_is_cancelled_without_having_run(gate: threading.Event) -> None:
    workers, ran = Workers(1), list[int]()
    blocking = workers.submit(lambda job: gate.wait())
    waiting = workers.submit(lambda job: ran.append(1))
    assert workers.depth == 1 or not blocking.running
    workers.give_up(waiting)
    gate.set()
    assert blocking.wait(10) and workers.drain(10)
    assert ran == [] and not waiting.done


def test_a_waiting_job_gets_a_fresh_thread_when_the_one_before_hangs(gate: threading.Event) -> None:
    workers = Workers(2)
    hung = [workers.submit(lambda job: gate.wait()) for _ in range(2)]
    waiting = workers.submit(lambda job: "ran")
    for job in hung:
        while not job.running:
            threading.Event().wait(0.001)
    workers.give_up(hung[0])
    assert waiting.wait(10) and waiting.result == "ran"


def test_a_full_queue_and_a_closed_pool_refuse(gate: threading.Event) -> None:
    workers = Workers(1, queue_limit=2)
    first = workers.submit(lambda job: gate.wait())
    while not first.running:
        threading.Event().wait(0.001)
    jobs = [workers.submit(lambda job: None) for _ in range(2)]
    with pytest.raises(StoreUnavailable, match="2 calls into the store wait"):
        workers.submit(lambda job: None)
    workers.close()
    gate.set()
    assert all(job.wait(10) for job in jobs), "what was queued still runs"
    with pytest.raises(StoreUnavailable, match="closed"):
        workers.submit(lambda job: None)


def test_the_function_sees_that_it_is_cancelled(gate: threading.Event) -> None:
    workers, seen = Workers(1), list[bool]()

    def work(job: Job) -> None:
        gate.wait()
        seen.append(job.cancelled.is_set())

    job = workers.submit(work)
    while not job.running:
        threading.Event().wait(0.001)
    workers.give_up(job)
    gate.set()
    assert job.wait(10)
    assert seen == [True]
