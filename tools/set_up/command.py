"""Runs one command of the set-up with its output in the log and a sign of life on the terminal."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from .failures import SetUpError, sentence
from .state import venv_python

HEARTBEAT_S = 15.0
LOG = ".cache/set-up.log"
_TELLING = ("Collecting", "Downloading", "Building", "Installing", "Using cached")


def environment(root: Path) -> dict[str, str]:
    """The caller's environment, less what leads pip out of `.venv`, and with scratch files in `.cache`."""
    cache = root / ".cache"
    dropped = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_REQUIRE_VIRTUALENV")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {
        "PIP_USER": "0",
        "PIP_NO_INPUT": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_PROGRESS_BAR": "off",
        "PIP_NO_COMPILE": "1",  # a module is compiled when it is first imported, and most never are
        "PIP_CACHE_DIR": str(cache / "pip"),
        "TMPDIR": str(cache / "tmp"),
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "VLLM_CONFIG_ROOT": str(cache / "vllm"),
        "VLLM_NO_USAGE_STATS": "1",
    }


def run(root: Path, *command: str) -> tuple[int, str]:
    """Run the command in the checkout. Returns its exit status and its output, which the log gets too."""
    log_path = root / LOG
    with open(log_path, "ab") as log:
        log.write(f"$ {' '.join(command)}\n".encode())
        log.flush()
        start = log.tell()
        process = subprocess.Popen(
            command,
            cwd=root,
            env=environment(root),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        status = _wait(process, log_path, start)
    return status, _output(log_path, start)


def pip(root: Path, *arguments: str) -> None:
    """`pip ARGUMENTS` in the environment; SetUpError with one sentence when it fails."""
    status, output = run(root, str(venv_python(root)), "-m", "pip", *arguments)
    if status:
        raise SetUpError(sentence(output, LOG))


def _wait(process: subprocess.Popen[bytes], log_path: Path, start: int) -> int:
    began = time.monotonic()
    try:
        while True:
            try:
                return process.wait(HEARTBEAT_S)
            except subprocess.TimeoutExpired:
                lines = [
                    line
                    for line in _output(log_path, start).splitlines()
                    if line.lstrip().startswith(_TELLING)
                ]
                doing = lines[-1].strip()[:70] if lines else ""
                print(f"      {time.monotonic() - began:.0f} s  {doing}", flush=True)
    finally:
        if process.poll() is None:  # Ctrl-C reached us first
            process.terminate()
            process.wait()


def _output(log_path: Path, start: int) -> str:
    with open(log_path, "rb") as log:
        log.seek(start)
        return log.read().decode(errors="replace")
