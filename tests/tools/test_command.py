"""Commands of the set-up: output kept, environment clean, signs of life while they run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.set_up import command


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / ".cache").mkdir()
    return tmp_path


def python(root: Path, code: str) -> tuple[int, str]:
    return command.run(root, sys.executable, "-c", code)


def test_run_returns_status_and_output_of_this_command_only(root: Path) -> None:
    assert python(root, "print('one')") == (0, "one\n")
    assert python(root, "import sys; print('two', file=sys.stderr); sys.exit(3)") == (3, "two\n")


def test_the_log_keeps_commands_and_output(root: Path) -> None:
    python(root, "print('one')")
    python(root, "print('two')")
    log = (root / command.LOG).read_text()
    assert log.index("print('one')") < log.index("\none\n") < log.index("print('two')") < log.index("\ntwo\n")


def test_a_command_runs_in_the_checkout_without_standard_input(root: Path) -> None:
    status, output = python(root, "import os, sys; print(os.getcwd(), repr(sys.stdin.read()))")
    assert (status, output) == (0, f"{root} ''\n")


def test_the_environment_keeps_pip_inside_the_checkout(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "PIP_TARGET", "PIP_PREFIX"):
        monkeypatch.setenv(name, "/elsewhere")
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    environment = command.environment(root)
    assert not {"PYTHONPATH", "PIP_TARGET", "PIP_PREFIX"} & environment.keys()
    assert environment["PIP_USER"] == "0"
    assert environment["PIP_INDEX_URL"] == "https://mirror.example/simple"  # the user's index stays
    for name in ("PIP_CACHE_DIR", "TMPDIR", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT"):
        assert environment[name].startswith(f"{root}/.cache/")


def test_a_long_command_shows_what_it_is_doing(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "HEARTBEAT_S", 0.05)
    waits_for_heartbeat = (
        "import pathlib, time; print('  Downloading torch-1.whl', flush=True); print('noise', flush=True);"
        "flag = pathlib.Path('seen')\n"
        "while not flag.exists(): time.sleep(0.01)"
    )
    real_print = print

    def print_and_tell(*values: object, **options: bool) -> None:
        real_print(*values)
        if "Downloading" in str(values):
            (root / "seen").touch()

    monkeypatch.setattr("builtins.print", print_and_tell)
    assert python(root, waits_for_heartbeat)[0] == 0
    assert "s  Downloading torch-1.whl" in capsys.readouterr().out


def test_output_that_is_no_utf_8_is_kept_readable(root: Path) -> None:
    assert python(root, r"import os; os.write(1, b'a\xffb\n')") == (0, "a\ufffdb\n")


def test_an_interrupted_command_is_ended(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes: list[subprocess.Popen[bytes]] = []

    def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is not None:
            processes.append(process)
            raise KeyboardInterrupt
        return real_wait(process)

    real_wait = subprocess.Popen.wait
    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        python(root, "import time; time.sleep(600)")
    assert processes[0].poll() is not None
