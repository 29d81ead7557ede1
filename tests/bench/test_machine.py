"""The machine and the commit that a report names."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

import pytest

from vllm_deepinfer.bench import machine
from vllm_deepinfer.bench.machine import Machine, current_commit


def test_here_describes_this_machine() -> None:
    here = Machine.here()
    assert here.cores == len(os.sched_getaffinity(0))
    assert here.python == platform.python_version()
    assert 0.1 < here.memory_gib < 1e5
    assert here.cpu


def test_accelerators_are_the_lines_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        machine, "_output", lambda *command: "H200\nH200" if command[0] == "nvidia-smi" else ""
    )
    assert Machine.here().accelerators == ("H200", "H200")


def test_a_program_that_is_missing_or_fails_prints_nothing() -> None:
    assert machine._output("no-such-program-anywhere") == ""
    assert machine._output("git", "no-such-command") == ""


def fake_git(answers: dict[str, str]) -> object:
    return lambda *command: answers.get(command[3], "")


HASH = "a" * 40


@pytest.mark.parametrize(
    ("answers", "commit"),
    [
        ({"ls-files": "machine.py", "rev-parse": HASH, "status": ""}, HASH),
        ({"ls-files": "machine.py", "rev-parse": HASH, "status": " M x.py"}, f"{HASH}-dirty"),
    ],
)
def test_commit_from_git(answers: dict[str, str], commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_output", fake_git(answers))
    assert current_commit() == commit


def test_commit_of_another_repository_around_an_installed_package_is_not_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "_output", fake_git({"rev-parse": HASH}))
    assert re.fullmatch(r"vllm-deepinfer \d+\.\d+\S*", current_commit())


def test_commit_of_this_checkout() -> None:
    root = Path(__file__).parents[2]
    head = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    if head.returncode:
        pytest.skip("the tests do not run from a git checkout")
    assert current_commit().startswith(head.stdout.strip())
