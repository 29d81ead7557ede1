"""The rehearsal of a Dockerfile: which commands run where, and what it refuses."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import dockerfile
import pytest

SCRIPT = Path(__file__).parents[2] / "docker" / "rehearse.py"


@pytest.fixture(scope="module")
def rehearse() -> Any:
    spec = importlib.util.spec_from_file_location("rehearse", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """Commands and their environments, instead of running them."""
    found: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], **options: Any) -> None:
        found.append((command, dict(options.get("env") or {})))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("PIP_CERT", "/outside.crt")
    return found


def play(rehearse: Any, text: str, tmp_path: Path) -> Any:
    image = rehearse.Image(tmp_path / "rootfs", tmp_path / "context")
    for command in dockerfile.parse_string(text):
        image.step(command)
    return image


def test_steps_run_inside_with_the_image_s_environment(
    rehearse: Any, ran: list[tuple[list[str], dict[str, str]]], tmp_path: Path
) -> None:
    text = 'FROM x:1\nWORKDIR /opt/a\nENV A="b c" PATH=/opt/bin:$PATH\nRUN echo $A && ls\nUSER 7\nRUN id\n'
    play(rehearse, text, tmp_path)
    (first, env), (second, _) = ran
    assert first[:3] == ["chroot", "--userspec=0:0", str(tmp_path / "rootfs")]
    assert first[-1] == "cd /opt/a && /bin/sh -c 'echo $A && ls'"
    assert env["A"] == "b c" and env["PATH"].startswith("/opt/bin:/usr/local/sbin:")
    assert env["PIP_CERT"] == "/outside.crt" and "HOME" in env
    assert second[1] == "--userspec=7:7"


def test_files_are_copied_without_what_is_compiled(rehearse: Any, tmp_path: Path) -> None:
    context = tmp_path / "context"
    (context / "pack" / "__pycache__").mkdir(parents=True)
    (context / "pack" / "a.py").touch()
    (context / "top.toml").touch()
    play(rehearse, "FROM x:1\nWORKDIR /opt\nCOPY top.toml ./\nCOPY pack pack\n", tmp_path)
    inside = tmp_path / "rootfs" / "opt"
    assert sorted(path.name for path in inside.rglob("*")) == ["a.py", "pack", "top.toml"]


@pytest.mark.parametrize("line", ["ADD a b", "COPY --from=x a b", 'SHELL ["sh"]'])
def test_what_it_cannot_rehearse_is_refused(rehearse: Any, line: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="on line 2 is nothing that this can rehearse"):
        play(rehearse, f"FROM x:1\n{line}\n", tmp_path)
