"""Admission: refuse new work early, with 429 and a time to come back, instead of queueing it without bound.

Three bounds: requests in work, requests that wait in the engine, and how busy this process's own thread is.
The last one matters because a saturated event loop starves new streams while running ones look fine (p99 TTFT
of 3.9 s where it was 10 ms; two-core VM, 2026-11-29).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_deepinfer.engine import Load
from vllm_deepinfer.gateway.errors import ApiError

ALWAYS_ADMIT = 8  # so few requests cannot saturate the door; whatever else keeps it busy, let them in
SAMPLE_S = 0.1
SCHEDSTAT = Path("/proc/thread-self/schedstat")
SMOOTHING = 0.3  # of a sample: about 0.5 s of memory


def runnable_s() -> float:
    """Seconds that the calling thread has run or was kept waiting for a core; not on Linux: has run.

    The waiting counts: a thread whose core others use is full long before it has used a core.
    """
    try:
        ran, waited, _ = SCHEDSTAT.read_text().split()
    except OSError:
        return time.thread_time()
    return (int(ran) + int(waited)) / 1e9


class BusyMeter:
    """How much of the time the calling thread has work, and a request in work takes, smoothed over 0.5 s.

    Args:
        wall, cpu: clocks, in seconds. active: requests in work.
    Attributes:
        share: in [0, 1]. per_request: the part of it that each request takes; kept while there are too few to
            tell.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = runnable_s,
        active: Callable[[], int] = lambda: 0,
    ) -> None:
        self._wall, self._cpu, self._active = wall, cpu, active
        self._last = (wall(), cpu())
        self._requests = 0.0
        self.share = 0.0
        self.per_request = 0.0

    def sample(self) -> None:
        """Take one sample; call regularly from the thread that is measured."""
        wall, cpu = self._wall(), self._cpu()
        elapsed = wall - self._last[0]
        if elapsed > 0:
            share = min(1.0, max(0.0, cpu - self._last[1]) / elapsed)
            self.share += SMOOTHING * (share - self.share)
            self._requests += SMOOTHING * (self._active() - self._requests)
            self._last = (wall, cpu)
            if self._requests >= ALWAYS_ADMIT:
                self.per_request = self.share / self._requests

    async def run(self) -> None:
        """Sample for ever."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.sample()


class Admission:
    """Counts requests in and out.

    Args:
        load: of the engine. max_active, max_waiting, max_busy: see GatewaySettings.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        load: Callable[[], Load],
        *,
        max_active: int,
        max_waiting: int,
        max_busy: float | None = None,
        meter: BusyMeter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._max_active = max_active
        self._max_waiting = max_waiting
        self._max_busy = max_busy
        self.meter = meter or BusyMeter(active=lambda: self.active)
        self._clock = clock
        self._hold_s = 1.0  # smoothed time that a request stays
        self.active = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold one place for the body of the `with`. Raises: ApiError 429 or 503."""
        self._check()
        started = self._clock()
        self.active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._hold_s += 0.1 * (self._clock() - started - self._hold_s)
            self.active -= 1
            if not self.active:
                self._idle.set()

    def _check(self) -> None:
        if self.draining:
            raise ApiError(503, "this server is stopping; send the request again.", retry_after_s=1.0)
        if self.active >= self._max_active:
            raise self._full(f"{self.active} requests are in work")
        waiting = self._load().waiting_requests
        if waiting >= self._max_waiting:
            raise self._full(f"{waiting} requests wait for the engine")
        if self._max_busy is not None and self.active >= ALWAYS_ADMIT:
            # Not by the share alone: it is half a second old, and as many as come in that time would pass.
            meter = self.meter
            if meter.share > self._max_busy or (self.active + 1) * meter.per_request > self._max_busy:
                raise self._full("the gateway is at its limit")

    def _full(self, why: str) -> ApiError:
        # Places come free at active / hold per second; by then half of the current ones have.
        retry = min(30.0, max(1.0, self._hold_s / 2))
        return ApiError(429, f"{why}; try again in {round(retry)} s.", code="overloaded", retry_after_s=retry)

    async def drain(self, timeout_s: float) -> bool:
        """Admit nothing more; wait for what is in work. Returns whether all of it ended in time."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
