"""Which machine and which commit a report comes from."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict


class Machine(BaseModel):
    """What a reader must know of the machine to compare figures."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    system: str
    cpu: str
    cores: int  # that this process may use
    memory_gib: float
    accelerators: tuple[str, ...]
    python: str

    @classmethod
    def here(cls) -> Self:
        """This machine."""
        return cls(
            system=f"{platform.system()} {platform.machine()}",
            cpu=_cpu_model(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            accelerators=_accelerators(),
            python=platform.python_version(),
        )


def current_commit() -> str:
    """Hash of the commit that this package runs from, `-dirty` after changes; outside git, the version."""
    folder = Path(__file__).parent
    tracked = _output("git", "-C", str(folder), "ls-files", "--error-unmatch", Path(__file__).name)
    head = _output("git", "-C", str(folder), "rev-parse", "HEAD") if tracked else ""
    if not head:
        return f"vllm-deepinfer {version('vllm-deepinfer')}"
    changed = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return head + ("-dirty" if changed else "")


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or "unknown"


def _accelerators() -> tuple[str, ...]:
    """Names as `nvidia-smi` gives them; empty without it. Other vendors are not looked for."""
    return tuple(_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines())


def _output(*command: str) -> str:
    """What the command prints; empty when it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
