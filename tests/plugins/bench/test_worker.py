"""The engine's process: its commands reach the workload, its stdout stays clean, and it outlives nobody."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from vllm_deepinfer_plugins.bench import profiling, worker
from vllm_deepinfer_plugins.bench.workload import Measurement


class Load:
    """Remembers what it was asked to measure."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, int], bool]] = []

    def _measure(self, task: str, timed: object, **arguments: int) -> Measurement:
        self.asked.append((task, arguments, timed is not None))
        return Measurement(tokens=7, seconds=0.5, foreign=None, fastest_step=0.25)

    def prefill(self, tokens: int, timed: AbstractContextManager[Any] | None = None) -> Measurement:
        return self._measure("prefill", timed, tokens=tokens)

    def decode(
        self, batch: int, context: int, outputs: int, timed: AbstractContextManager[Any] | None = None
    ) -> Measurement:
        return self._measure("decode", timed, batch=batch, context=context, outputs=outputs)

    def check(self) -> list[str]:
        return []


def test_measurements_cross_the_pipe_whole() -> None:
    load = Load()
    commands = worker.commands(load)  # type: ignore[arg-type]
    sent = commands["decode"](batch=8, context=512, outputs=33)
    assert Measurement(**sent) == Measurement(7, 0.5, None, 0.25)
    assert Measurement(**commands["prefill"](tokens=2048)).rate == 14.0
    assert load.asked == [
        ("decode", {"batch": 8, "context": 512, "outputs": 33}, False),
        ("prefill", {"tokens": 2048}, False),
    ]
    assert commands["check"]() == []


def test_profile_times_the_task_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "profiled", lambda measure: {"seconds": measure(nullcontext()).seconds})
    load = Load()
    commands = worker.commands(load)  # type: ignore[arg-type]
    assert commands["profile"](task="decode", batch=1, context=9, outputs=3) == {"seconds": 0.5}
    assert load.asked == [("decode", {"batch": 1, "context": 9, "outputs": 3}, True)]


def test_replies_alone_reach_stdout() -> None:
    code = (
        "import os; from vllm_deepinfer_plugins.bench import worker as w; replies = w._take_stdout();"
        "print('a log line', flush=True); os.system('echo another');"
        "replies.write('a reply'); replies.flush()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "a reply"
    assert "a log line" in done.stderr and "another" in done.stderr


def test_it_ends_when_its_benchmark_was_killed() -> None:
    """A parent that leaves at once, while its child is still at work."""
    child = (
        "import os, time; from vllm_deepinfer_plugins.bench import worker;"
        "worker._end_with(os.getppid(), 0.01); print(os.getpid(), flush=True); time.sleep(300)"
    )
    parent = (
        f"import os, subprocess; p = subprocess.Popen([{sys.executable!r}, '-c', {child!r}],"
        "stdout=subprocess.PIPE, text=True); print(p.stdout.readline(), flush=True); os._exit(9)"
    )
    pid = int(subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True).stdout)
    deadline = time.monotonic() + 120
    while _is_alive(pid):
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_it_stays_while_its_benchmark_lives() -> None:
    code = (
        "import os, time; from vllm_deepinfer_plugins.bench import worker;"
        "worker._end_with(os.getppid(), 0.01); time.sleep(0.3); print('still here')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "still here")
