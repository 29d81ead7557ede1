"""Time, passed in: the event loop's own, which a test can make virtual for everything that runs on the loop.

`run_virtual(main())` runs a coroutine on a loop whose time jumps to the next timer whenever nothing is
ready. An hour of simulated traffic takes as long as its computing takes, and every `asyncio.sleep` and
`wait_for` of the code under test follows, not only the engine's.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """A source of time, in seconds since an arbitrary moment."""

    def now(self) -> float:
        """Current time."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`; 0 lets other tasks run once."""
        ...


class LoopClock:
    """The event loop's time: real on an ordinary loop, virtual on a `VirtualTimeLoop`.

    It keeps the loop that it was first asked on, and then answers from anywhere.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def now(self) -> float:
        """Current time of the loop."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        """`asyncio.sleep`."""
        await asyncio.sleep(seconds)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits for a timer. Its time starts at 0.

    Threads are invisible to it: while one works for `run_in_executor`, timers may fire early. Sockets are
        fine as long
    as both ends live on this loop, because loopback data is there before the sender's call returns.
    """

    def __init__(self) -> None:
        self._virtual_now = 0.0
        super().__init__(_SkippingSelector(self))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual_now

    def skip(self, seconds: float) -> None:
        """Let virtual time pass."""
        self._virtual_now += seconds


class _SkippingSelector(selectors.DefaultSelector):
    """Answers at once where the loop asked to wait for its next timer, and moves the loop's time there."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        events = super().select(0)
        if not events:
            self._loop.skip(timeout)
        return events


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
