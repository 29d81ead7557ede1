"""An engine core whose parent was killed ends; any other process stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.gateway.test_processes import alive

PARENT = """
import multiprocessing, sys, time

def child(deaf, pipe):
    import os, signal
    from vllm_deepinfer_plugins import orphans
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        orphans.GRACE_S = 0.2
    pipe.send((orphans.watch_parent() is not None, orphans.watch_parent() is orphans.watch_parent()))
    time.sleep(60)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(sys.argv[2] == "deaf", theirs), name=sys.argv[1])
    process.start()
    print(process.pid, *ours.recv(), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("name", "manner", "watched"),
    [("EngineCore_DP0", "", True), ("EngineCore", "deaf", True), ("Other", "", False)],
)
def test_after_its_parent_was_killed(tmp_path: Path, name: str, manner: str, watched: bool) -> None:
    from pathlib import Path

    script = Path(str(tmp_path)) / "parent.py"  # spawned children import it
    script.write_text(PARENT)
    with subprocess.Popen(
        [sys.executable, str(script), name, manner], stdout=subprocess.PIPE, text=True
    ) as top:
        assert top.stdout is not None
        pid, found, once = top.stdout.readline().split()
        assert (found, once) == (str(watched), "True")
        top.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + (20 if watched else 1)
    while alive(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(int(pid)) is not watched
    if not watched:
        os.kill(int(pid), signal.SIGKILL)


def test_a_process_without_a_parent_of_this_kind_is_left_alone() -> None:
    from vllm_deepinfer_plugins import orphans

    assert orphans.watch_parent() is None
