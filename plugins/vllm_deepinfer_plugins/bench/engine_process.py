"""The benchmark's end of an engine process: start it, ask it, end it."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from . import protocol

# Everything in one process, no network, and KV space for more than eight requests of 4,096 tokens.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_BATCH_INVARIANT": "0",  # that mode has a price of its own, and V4 does not have it
    "HF_HUB_OFFLINE": "1",
}


class EngineFailed(RuntimeError):
    """An engine process did not start, died, hung or answered with an error; the message says which."""


def worker_command(side: str, model: Path) -> list[str]:
    """The command line of `worker.py` for one side."""
    return [sys.executable, "-m", f"{__package__}.worker", side, str(model)]


class EngineProcess:
    """A process that speaks `protocol`. Use as a context manager.

    Attributes:
        side: Its name in messages.
        state: What it said when it was up.
    """

    def __init__(self, side: str, command: Sequence[str], timeout: float = 600.0) -> None:
        """Start the process without waiting for it; no answer may take longer than `timeout` seconds."""
        self.side = side
        self.state: Mapping[str, Any] = {}
        self._timeout = timeout
        self._log = tempfile.TemporaryFile(prefix="bench-")  # noqa: SIM115 (closed in `close`)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._replies: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_up(self) -> None:
        """Block until the engine serves.

        Raises:
            EngineFailed: It does not.
        """
        self.state = self._reply("start")

    def ask(self, do: str, **arguments: Any) -> Any:
        """Run one command there and return its result.

        Raises:
            EngineFailed: It raised there, took too long, or the process is gone.
        """
        with contextlib.suppress(BrokenPipeError):  # it is gone, and `_reply` says so
            protocol.send(self._requests, {"do": do, **arguments})
        return self._reply(do)

    def close(self) -> None:
        """End the process: it leaves when its stdin closes, and is killed if it has not in ten seconds."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._answers.close()
        self._log.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        try:
            while (message := protocol.receive(self._answers)) is not None:
                self._replies.put(message)
        except ValueError as error:
            self._replies.put({"error": f"it spoke no JSON ({error})"})
        self._replies.put(None)

    def _reply(self, do: str) -> Any:
        try:
            message = self._replies.get(timeout=self._timeout)
        except queue.Empty:
            message = {"error": f"no answer within {self._timeout:g} s"}
        if message is None:
            self._replies.put(None)  # the next question gets the same answer
            message = {"error": f"its process is gone{self._last_words()}"}
        if "error" in message:
            raise EngineFailed(f"engine {self.side!r} failed at {do!r}: {message['error']}")
        return message["ok"]

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f", its last log line being {lines[-1].strip()!r}" if lines else ""
