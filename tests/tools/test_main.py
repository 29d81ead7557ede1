"""`python -m tools.set_up`: nothing to do is quick, two at once take turns, a failure is one sentence."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from tools.set_up import __main__ as main_module
from tools.set_up import preflight, state, steps
from tools.set_up.failures import SetUpError


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(main_module, "ROOT", tmp_path)
    monkeypatch.setattr(preflight, "check", lambda root: None)
    return tmp_path


def finish(root: Path) -> None:
    python = state.venv_python(root)
    python.parent.mkdir(parents=True, exist_ok=True)
    python.touch(0o755)
    state.write(root, "done")


def never(root: Path) -> None:
    raise AssertionError("a step ran")


def test_a_complete_environment_is_left_alone_in_silence(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(root)
    monkeypatch.setattr(steps, "run", never)
    assert main_module.main() == 0
    assert capsys.readouterr().out == ""


def test_the_steps_run_after_the_checks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(preflight, "check", lambda root: order.append("checks"))
    monkeypatch.setattr(steps, "run", lambda root: order.append("steps"))
    assert main_module.main() == 0
    assert order == ["checks", "steps"]


def test_a_failure_is_one_sentence_and_status_1(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(root: Path) -> None:
        raise SetUpError("no C compiler on PATH.")

    monkeypatch.setattr(preflight, "check", fail)
    monkeypatch.setattr(steps, "run", never)
    assert main_module.main() == 1
    assert capsys.readouterr().err == "Set-up failed: no C compiler on PATH.\n"


def test_ctrl_c_is_status_130(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(root: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(steps, "run", interrupted)
    assert main_module.main() == 130


def test_a_second_set_up_waits_and_then_has_nothing_to_do(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(steps, "run", never)
    waits = threading.Event()
    real_flock = fcntl.flock

    def flock(file: int, operation: int) -> None:
        if not operation & fcntl.LOCK_NB:
            waits.set()
        real_flock(file, operation)

    (root / ".cache").mkdir()
    with open(root / ".cache" / "set-up.lock", "w") as other:
        real_flock(other, fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", flock)
        second = threading.Thread(target=main_module.set_up, args=(root,))
        second.start()
        assert waits.wait(30)
        finish(root)
    second.join(30)
    assert not second.is_alive()
    assert "Waiting for another set-up" in capsys.readouterr().out
