"""A process that works, one that fails, one that dies and one that hangs, each a line of Python."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from vllm_deepinfer_plugins.bench.engine_process import (
    ENVIRONMENT,
    EngineFailed,
    EngineProcess,
    worker_command,
)

WORKS = """
import os, sys
from vllm_deepinfer_plugins.bench import protocol
protocol.send(sys.stdout, {"ok": {"threads": 2}})
def fail(): raise ValueError("cannot")
commands = {"add": lambda a, b: a + b, "fail": fail, "pid": os.getpid, "environment": os.environ.get}
protocol.serve(commands, sys.stdin, sys.stdout)
"""


def process(code: str, timeout: float = 60.0) -> EngineProcess:
    return EngineProcess("ours", [sys.executable, "-c", code], timeout)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_answers_and_leaves_nothing_behind() -> None:
    with process(WORKS) as engine:
        engine.wait_until_up()
        assert engine.state == {"threads": 2}
        assert engine.ask("add", a=2, b=3) == 5
        assert engine.ask("environment", key="VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
        pid = engine.ask("pid")
        assert is_alive(pid)
    assert not is_alive(pid)


def test_a_command_that_fails_is_told_and_the_next_one_works() -> None:
    with process(WORKS) as engine:
        engine.wait_until_up()
        with pytest.raises(EngineFailed, match=r"^engine 'ours' failed at 'fail': ValueError: cannot$"):
            engine.ask("fail")
        assert engine.ask("add", a=1, b=1) == 2


def test_a_process_that_dies_is_told_with_its_last_log_line() -> None:
    code = "import sys; print('one', file=sys.stderr); print('out of memory', file=sys.stderr); sys.exit(3)"
    with process(code) as engine:
        with pytest.raises(EngineFailed, match=r"'start': its process is gone.*'out of memory'"):
            engine.wait_until_up()
        with pytest.raises(EngineFailed, match="'add': its process is gone"):
            engine.ask("add", a=1, b=1)


def test_noise_on_stdout_is_told() -> None:
    with process("print('hello')") as engine, pytest.raises(EngineFailed, match="it spoke no JSON"):
        engine.wait_until_up()


def test_a_process_that_hangs_is_told_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import time, sys; print('{\"ok\": {}}', flush=True)\nwhile True: time.sleep(1)"
    engine = process(code, timeout=0.5)
    _wait_for_first_message(engine)
    engine.wait_until_up()
    with pytest.raises(EngineFailed, match=r"no answer within 0\.5 s"):
        engine.ask("add", a=1, b=1)
    wait = engine._process.wait
    monkeypatch.setattr(engine._process, "wait", lambda timeout=None: wait(0.1 if timeout else None))
    engine.close()
    assert engine._process.returncode == -9


def _wait_for_first_message(engine: EngineProcess) -> None:
    """Python itself may need longer to start than the timeout under test."""
    while engine._replies.empty():
        time.sleep(0.01)


def test_the_worker_runs_in_the_same_python() -> None:
    command = worker_command("ours", Path("/model"))
    assert command == [sys.executable, "-m", "vllm_deepinfer_plugins.bench.worker", "ours", "/model"]
    assert ENVIRONMENT["HF_HUB_OFFLINE"] == "1"
