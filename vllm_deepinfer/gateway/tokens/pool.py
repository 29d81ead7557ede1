"""Threads that tokenise pieces of text, shared fairly between prompts.

DeepSeek's tokenizer releases the GIL while it works, so threads run in parallel and the event loop stays
responsive. A prompt keeps at most `threads` tasks in the queue, and each task goes to the back of the queue
after one piece: a short prompt waits for a few pieces of a long one (about 4 ms each), not for all of them.
"""

import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias, TypeVar

from vllm_deepinfer.gateway.tokens.errors import TokenizerBusyError

T = TypeVar("T")
Ids: TypeAlias = "array[int]"
Encode = Callable[[str], Sequence[int]]


class EncodePool:
    """A bounded pool: `threads` workers, and at most `max_waiting_chars` of text accepted but not yet
    tokenised.
    """

    def __init__(self, encode: Encode, threads: int, max_waiting_chars: int) -> None:
        self.encode = encode
        self.threads = threads
        self.max_waiting_chars = max_waiting_chars
        self.waiting_chars = 0
        self._lock = threading.Lock()
        self._jobs: set[_Job] = set()
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")

    def run(self, pieces: Sequence[str]) -> "Future[list[Ids]]":
        """Ids of every piece, in order. Cancelling the future stops the work after the pieces in progress.

        Raises TokenizerBusyError if that would be more text than the pool takes on.
        """
        chars = sum(map(len, pieces))
        with self._lock:
            if self.waiting_chars and self.waiting_chars + chars > self.max_waiting_chars:
                raise TokenizerBusyError(
                    f"{self.waiting_chars} characters of other prompts wait to be tokenised; try again later."
                )
            self.waiting_chars += chars
        job = _Job(self, pieces)
        self._jobs.add(job)
        job.future.add_done_callback(lambda _: self._jobs.discard(job))
        for _ in range(min(self.threads, len(pieces))):
            self._executor.submit(job.step)
        return job.future

    def call(self, function: Callable[..., T], *args: object) -> "Future[T]":
        """Runs one function on a worker."""
        return self._executor.submit(function, *args)

    def resubmit(self, job: "_Job") -> None:
        """Puts a job's task at the back of the queue."""
        self._executor.submit(job.step)

    def done(self, chars: int) -> None:
        """Takes `chars` off the waiting text."""
        with self._lock:
            self.waiting_chars -= chars

    def close(self) -> None:
        """Stops the threads; prompts still waiting are cancelled."""
        for job in list(self._jobs):
            job.future.cancel()
        self._executor.shutdown(wait=True, cancel_futures=True)


class _Job:
    """The pieces of one prompt. Ends its future exactly once: with ids, an exception, or cancelled."""

    def __init__(self, pool: EncodePool, pieces: Sequence[str]) -> None:
        self.future: Future[list[Ids]] = Future()
        self._pool = pool
        self._pieces = pieces
        self._ids: list[Ids] = [array("I")] * len(pieces)
        self._next = 0
        self._left = len(pieces)
        self._lock = threading.Lock()
        if not pieces:
            self.future.set_result([])

    def step(self) -> None:
        """Tokenises the next piece, then queues again."""
        with self._lock:
            index = self._next
            self._next += 1
        if index >= len(self._pieces):
            return
        error: BaseException | None = None
        try:
            if not self.future.done():
                self._ids[index] = array("I", self._pool.encode(self._pieces[index]))
        except BaseException as caught:  # whatever it is belongs to whoever waits for the future
            error = caught
        self._pool.done(len(self._pieces[index]))
        self._finish_piece(error)
        if index + 1 < len(self._pieces):
            self._pool.resubmit(self)

    def _finish_piece(self, error: BaseException | None) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
            ending = not self.future.done() and (last or error is not None)
            if not ending or not self.future.set_running_or_notify_cancel():
                return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(self._ids)
