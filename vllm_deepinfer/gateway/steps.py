"""Awaitables driven by hand up to their first suspension, for what nearly always ends before it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Rest:
    """The rest of an awaitable whose first step was driven by hand and yielded `waits_for`.

    The future still carries the mark that its own `__await__` set, so a task that gets it from here waits for
    it as it would have there. What is thrown in, such as a cancellation, reaches the awaitable.
    """

    def __init__(self, steps: Generator[Any, Any, Any], waits_for: Any) -> None:
        self._steps = steps
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, Any]:
        steps, waits_for = self._steps, self._waits_for
        while True:
            try:
                value = yield waits_for
            except BaseException as error:
                try:
                    waits_for = steps.throw(error)
                except StopIteration as end:
                    return end.value
            else:
                try:
                    waits_for = steps.send(value)
                except StopIteration as end:
                    return end.value


async def within(timeout_s: float, awaitable: Awaitable[T]) -> T:
    """The result of `awaitable`; its timeout is only set up if it has to wait. Raises: TimeoutError."""
    steps: Generator[Any, Any, T] = awaitable.__await__()
    try:
        waits_for = next(steps)
    except StopIteration as end:
        result: T = end.value
        return result
    async with asyncio.timeout(timeout_s):
        rest: T = await Rest(steps, waits_for)
        return rest


def eager_task(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run `work` up to its first suspension, here and now; a task for the rest of it, None if there is none.

    `asyncio.Task(eager_start=True)` of Python 3.12, for 3.11 too. Until the first suspension there is no
    current task, so nothing may open an `asyncio.timeout` before it. Raises: what `work` raises at once.
    """
    context = contextvars.copy_context()
    try:
        waits_for = context.run(work.send, None)
    except StopIteration:
        return None

    async def rest() -> None:
        await Rest(cast(Generator[Any, Any, None], work), waits_for)

    return loop.create_task(rest(), context=context)
