"""A benchmark leaves no process behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from vllm_deepinfer.bench.gateway.processes import Child, free_port

# A server whose helper process outlives it, as an engine core does, and which says the helper's id.
SERVER = """
import subprocess, sys, time
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
helper = subprocess.Popen([sys.executable, "-c", stubborn])
print(helper.pid, flush=True)
for line in sys.stdin:
    print("answer to " + line.strip(), flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    """Running, not a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_helpers_of_a_child_end_with_it(tmp_path: Path) -> None:
    with Child([sys.executable, "-c", SERVER], None, tmp_path / "log") as child:
        helper = int(child._line())
        assert child.ask("this") == "answer to this"
        assert alive(helper) and alive(child.pid)
    deadline = time.monotonic() + 10
    while alive(helper) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(helper) and not alive(child.pid)


def test_a_child_that_ends_by_itself_shows_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('what went wrong')"]
    with (
        Child(command, None, tmp_path / "log") as child,
        pytest.raises(RuntimeError, match="what went wrong"),
    ):
        child.ready()


def test_pinned_and_with_its_environment(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    code = "import os; print(sorted(os.sched_getaffinity(0)), os.environ['HINT'], flush=True); input()"
    with Child([sys.executable, "-c", code], core, tmp_path / "log", {"HINT": "here"}) as child:
        assert child._line() == f"[{core}] here"
        assert child.cpu_seconds() >= 0


def test_ports_differ() -> None:
    assert len({free_port() for _ in range(5)}) > 1
