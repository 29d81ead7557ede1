"""What ends at once needs no timeout; what waits gets one; what is thrown in arrives."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest

from vllm_deepinfer.gateway.steps import Rest, eager_task, within


async def at_once(value: int) -> int:
    return value


async def test_what_never_waits_needs_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "timeout", None)  # would raise if it were used
    assert await within(1.0, at_once(3)) == 3


async def test_what_waits_is_waited_for_as_often_as_it_likes() -> None:
    async def thrice() -> list[int]:
        seen = []
        for number in range(3):
            await asyncio.sleep(0.001)
            seen.append(number)
        return seen

    assert await within(10.0, thrice()) == [0, 1, 2]


async def test_results_of_futures_arrive() -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[str] = loop.create_future()
    loop.call_soon(future.set_result, "here")

    async def wait() -> str:
        return await future

    assert await within(10.0, wait()) == "here"


async def test_a_timeout_is_seen_inside_and_outside() -> None:
    seen: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    with pytest.raises(TimeoutError):
        await within(0.01, forever())
    assert seen == ["cancelled"]


async def test_errors_before_and_after_the_first_wait() -> None:
    async def fails(waits: bool) -> None:
        if waits:
            await asyncio.sleep(0)
        raise ValueError("broken")

    for waits in (False, True):
        with pytest.raises(ValueError, match="broken"):
            await within(1.0, fails(waits))


async def test_a_cancellation_may_be_survived() -> None:
    """The awaitable decides: it can catch what is thrown in, wait again, and return."""

    async def stubborn() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
        return "done"

    steps: Any = stubborn().__await__()
    first = next(steps)

    async def rest() -> str:
        result: str = await Rest(steps, first)
        return result

    task = asyncio.create_task(rest())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "done"


async def test_what_ends_at_once_needs_no_task() -> None:
    done: list[int] = []

    async def work() -> None:
        done.append(1)

    assert eager_task(asyncio.get_running_loop(), work()) is None and done == [1]


async def test_an_eager_task_runs_up_to_its_first_wait_and_then_on_its_own() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="outside")
    seen: list[str] = []

    async def work() -> None:
        variable.set("inside")
        seen.append("begun")
        await asyncio.sleep(0.001)
        async with asyncio.timeout(10):  # there is a current task by now
            await asyncio.sleep(0)
        seen.append(variable.get())

    task = eager_task(asyncio.get_running_loop(), work())
    assert seen == ["begun"] and variable.get() == "outside"
    assert task is not None
    await task
    assert seen == ["begun", "inside"] and variable.get() == "outside"


async def test_an_eager_task_can_be_cancelled() -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    task = eager_task(asyncio.get_running_loop(), work())
    assert task is not None
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cancelled"]


async def test_what_fails_at_once_says_so_at_once() -> None:
    async def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        eager_task(asyncio.get_running_loop(), work())
