"""The stamp `.venv/set-up.json`: what the environment was built from, and whether that was finished."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tomllib
from pathlib import Path
from typing import Literal

State = Literal["running", "failed", "done"]

INPUTS = (
    "pyproject.toml",
    "plugins/pyproject.toml",
    "tools/vllm_metadata/pyproject.toml",
    "tools/set_up/*.py",
)


def venv_python(root: Path) -> Path:
    """The interpreter of the checkout's environment."""
    return root / ".venv" / "bin" / "python"


def key(root: Path) -> str:
    """Hex digest of all that the environment depends on: input files, Python, place of the checkout.

    The place counts because a virtual environment does not survive a move.
    """
    digest = hashlib.sha256(f"{platform.python_version()}\0{root}\0".encode())
    for pattern in INPUTS:
        for path in sorted(root.glob(pattern)):
            digest.update(f"{path.relative_to(root)}\0".encode() + _content(path))
    return digest.hexdigest()


def _content(path: Path) -> bytes:
    """A pyproject.toml without the settings of linters and tests: they change nothing that is installed."""
    if path.name != "pyproject.toml":
        return path.read_bytes()
    tables = tomllib.loads(path.read_text())
    tools = tables.get("tool", {})
    tables["tool"] = {name: tools[name] for name in ("setuptools", "setuptools_scm") if name in tools}
    return json.dumps(tables, sort_keys=True).encode()


def read(root: Path) -> dict[str, str]:
    """The stamp, or an empty dict where there is none to be read."""
    try:
        stamp = json.loads((root / ".venv" / "set-up.json").read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write(root: Path, state: State) -> None:
    """Replace the stamp atomically."""
    stamp = {"state": state, "key": key(root), "root": str(root), "python": platform.python_version()}
    temporary = root / ".venv" / "set-up.json.new"
    temporary.write_text(json.dumps(stamp) + "\n")
    os.replace(temporary, root / ".venv" / "set-up.json")


def is_current(root: Path) -> bool:
    """True when `.venv` is complete and nothing that it was built from has changed."""
    stamp = read(root)
    return (
        stamp.get("state") == "done"
        and stamp.get("key") == key(root)
        and os.access(venv_python(root), os.X_OK)
    )


def is_reusable(root: Path) -> bool:
    """True when pip can go on with the `.venv` that is there.

    A set-up that was killed ("running") may have left half a package that pip takes for a whole one, so that
    environment is built anew; one whose pip ended with an error ("failed") is consistent.
    """
    stamp = read(root)
    return (
        stamp.get("state") in ("failed", "done")
        and stamp.get("root") == str(root)
        and stamp.get("python") == platform.python_version()
        and os.access(venv_python(root), os.X_OK)
    )
