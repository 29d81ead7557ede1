"""Threads for I/O that may hang: a job past its deadline is given up, its thread replaced.

A read that hangs in the kernel cannot be ended. Its thread is written off until it comes back; while as many
hang as there are workers, new jobs are refused at once: a dead mount costs a miss and not a pile of threads.
Threads are daemons: a hung one does not keep the process from ending.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm_deepinfer.store.errors import StoreUnavailable


class Job:
    """One call. `done` tells when `result` or `error` is there; the function looks at `cancelled`."""

    def __init__(self, function: Callable[[Job], Any], notify: Callable[[Job], None] | None) -> None:
        self._function, self._notify = function, notify
        self._finished = threading.Event()
        self.cancelled = threading.Event()
        self.submitted = time.monotonic()
        self.running = False
        self.written_off = False
        self.result: Any = None
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._finished.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within that time."""
        return self._finished.wait(timeout_s)

    def run(self) -> None:
        """In a worker thread."""
        try:
            if not self.cancelled.is_set():
                self.result = self._function(self)
        except BaseException as error:  # it is the waiting side's to judge
            self.error = error
        self._finished.set()
        if self._notify is not None:
            self._notify(self)


class Workers:
    """A pool of daemon threads.

    Args:
        size: Threads that work; as many may hang before jobs are refused.
        queue_limit: Jobs that may wait.
        name: Of the threads.
    """

    def __init__(self, size: int = 4, queue_limit: int = 4_096, name: str = "store") -> None:
        self.size, self._limit, self._name = size, queue_limit, name
        self._queue: deque[Job] = deque()
        self._ready = threading.Condition()
        self._threads = 0
        self._idle = 0
        self._hung = 0
        self._closed = False

    def submit(self, function: Callable[[Job], Any], notify: Callable[[Job], None] | None = None) -> Job:
        """Queue a call of `function(job)`; `notify(job)` follows it in the same thread.

        Raises:
            StoreUnavailable: too many jobs hang or wait, or the pool is closed.
        """
        job = Job(function, notify)
        with self._ready:
            if self._closed:
                raise StoreUnavailable("the store is closed")
            if self._hung >= self.size:
                raise StoreUnavailable(f"{self._hung} calls into the store hang")
            if len(self._queue) >= self._limit:
                raise StoreUnavailable(f"{self._limit} calls into the store wait already")
            self._queue.append(job)
            if not self._idle and self._threads - self._hung < self.size:
                self._start()
            self._ready.notify()
        return job

    def call(self, function: Callable[[Job], Any], deadline_s: float) -> Any:
        """Run `function(job)` and wait for it.

        Raises:
            StoreUnavailable: refused, or not done within the deadline. What the function raises is passed on.
        """
        job = self.submit(function)
        if not job.wait(deadline_s):
            self.give_up(job)
            raise StoreUnavailable(f"the store has not answered within {deadline_s:g} s")
        if job.error is not None:
            raise job.error
        return job.result

    def give_up(self, job: Job) -> None:
        """Nobody waits any longer: cancel what has not begun, write off the thread of what has."""
        job.cancelled.set()
        with self._ready:
            if job in self._queue:
                self._queue.remove(job)
            elif job.running and not job.done and not job.written_off:
                job.written_off = True
                self._hung += 1
                if self._queue and self._hung < self.size:
                    self._start()

    @property
    def depth(self) -> int:
        """Jobs that wait."""
        return len(self._queue)

    @property
    def hung(self) -> int:
        """Jobs that were given up and have not come back."""
        return self._hung

    def close(self) -> None:
        """Refuse new jobs and let the threads end after the queued ones."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Whether everything that was submitted has ended within that time."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            with self._ready:
                if not self._queue and self._idle == self._threads - self._hung:
                    return True
            time.sleep(0.005)
        return False

    def _start(self) -> None:
        self._threads += 1
        threading.Thread(target=self._work, name=f"{self._name}-{self._threads}", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._ready:
                self._idle += 1
                while not self._queue and not self._closed:
                    self._ready.wait()
                self._idle -= 1
                if not self._queue:
                    self._threads -= 1
                    return
                job = self._queue.popleft()
                job.running = True
            job.run()
            with self._ready:
                if job.written_off:  # another thread took its place meanwhile
                    self._hung -= 1
                    if self._threads - self._hung > self.size:
                        self._threads -= 1
                        return
