"""Child processes of the benchmark: pinned to a core, asked by line, their CPU time from the kernel's
accounting.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

SCHEDULED = 2  # CPUCLOCK_SCHED


class Guard:
    """A process that ends children which this one does not live to end; see guard.py."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def tell(self, change: str, group: int) -> None:
        """`+`: look after this process group; `-`: it has ended."""
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py"))]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{change}{group}\n".encode())
        self._process.stdin.flush()


_GUARD = Guard()


class Child:
    """A process, on one core unless that is None. Use as a context manager: leaving it ends the process."""

    def __init__(
        self, command: Sequence[str], core: int | None, log: Path, env: dict[str, str] | None = None
    ) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**os.environ, **(env or {})},
                preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
                start_new_session=True,
            )
        _GUARD.tell("+", self.pid)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        # Its whole group: an engine core outlives a server that did not get to stop it.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        _GUARD.tell("-", self.pid)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def check(self) -> None:
        """Raises RuntimeError with the end of its log if it has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"a benchmark process ended: {self._log.read_text(errors='replace')[-2000:]}")

    def ready(self) -> None:
        """Wait for a child that speaks lines."""
        self._line("ready")

    def ask(self, command: str) -> str:
        """One command, one line of answer."""
        self.check()
        stdin: IO[bytes] | None = self._process.stdin
        assert stdin is not None
        stdin.write(command.encode() + b"\n")
        stdin.flush()
        return self._line()

    def _line(self, expected: str | None = None) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode().strip()
        if not line or (expected is not None and line != expected):
            time.sleep(0.2)
            self.check()
            raise RuntimeError(f"a benchmark process said {line!r}")
        return line

    def cpu_seconds(self) -> float:
        """User and system time of all its threads since it started, as the scheduler counts it, to the ns."""
        # The kernel's clock id of another process's CPU time, see clock_getcpuclockid(3). /proc has ticks of
        # 10 ms, and a window of some seconds only about 40 of them.
        return time.clock_gettime((~self.pid << 3) | SCHEDULED)

    def wait_for(self, url: str, timeout_s: float = 60) -> None:
        """Wait until `url` answers."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.check()
            try:
                with urllib.request.urlopen(url, timeout=2):
                    return
            except (OSError, urllib.error.HTTPError):
                time.sleep(0.1)
        raise RuntimeError(f"{url} did not answer: {self._log.read_text(errors='replace')[-2000:]}")


def free_port() -> int:
    """A TCP port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
