"""What a benchmark leaves behind when it is killed ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.gateway.test_processes import alive
from vllm_deepinfer.bench.gateway.guard import watch

# A benchmark with a server that has a helper of its own, both deaf to SIGTERM; says their ids.
BENCHMARK = """
import sys, time
from pathlib import Path
from vllm_deepinfer.bench.gateway.processes import Child
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); "
server = stubborn + "import os, subprocess, sys; helper = subprocess.Popen([sys.executable, '-c', " + repr(
    stubborn + "time.sleep(600)") + "]); print(helper.pid, flush=True); time.sleep(600)"
child = Child([sys.executable, "-c", server], None, Path(sys.argv[1]) / "log")
print(child.pid, child._line(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("lines", "left"),
    [([], set()), (["+3\n", "+4\n"], {3, 4}), (["+3\n", "-3\n", "+5\n"], {5}), (["-9\n"], set())],
)
def test_groups_come_and_go(lines: list[str], left: set[int]) -> None:
    assert watch(lines) == left


def test_nothing_outlives_a_benchmark_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BENCHMARK, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        pids = [int(pid) for pid in benchmark.stdout.readline().split()]
        assert len(pids) == 2 and all(map(alive, pids))
        benchmark.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(alive, pids))
