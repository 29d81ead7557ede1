"""Compiles the kernels with the machine's own C compiler, once per machine, and keeps the result.

The library is made for the processor that it runs on (``-march=native``), so a wheel could not carry it.
Its name is a digest of the sources, the flags, the compiler's version and the processor's features: a changed
source or another machine on the same home directory compiles anew. OpenMP's runtime is not linked in: its
symbols come from the one that PyTorch has loaded, so that both share one pool of threads.

A digest of the file stands behind its last byte, where no loader looks: to load a library that a full disk or
a crash has cut short could end the process with a bus error, at each start anew. A damaged one is made again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
FLAGS = [
    "-O3",
    "-std=gnu11",
    "-march=native",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=default",
    "-fno-math-errno",
    "-fno-trapping-math",
]
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS.append("-mprefer-vector-width=512")
TIMEOUT = 300
"""Seconds that a compiler may take."""


class BuildError(Exception):
    """The kernels cannot be compiled here; the message says why in one sentence."""


def compiler() -> list[str]:
    """The C compiler's command: ``$CC``, or the first of cc, gcc and clang.

    Raises:
        BuildError: There is none, or ``$CC`` is no command.
    """
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise BuildError(f"CC is {os.environ['CC']!r}, which is no command: {error}") from error
    for command in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    what = f"CC names {named[0]!r}, which is not on PATH" if named else "there is no cc, gcc or clang on PATH"
    raise BuildError(f"{what}: install a C compiler (Debian: apt install gcc libc6-dev)")


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``$XDG_CACHE_HOME/vllm-deepinfer/kernels``."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "vllm-deepinfer" / "kernels"


def build(folder: Path | None = None, extra: Sequence[str] = ()) -> Path:
    """The path of the compiled library, compiled now if it is not there yet.

    Args:
        folder: Where to keep it, by default `cache_folder`.
        extra: More compiler flags, behind `FLAGS`.

    Raises:
        BuildError: No compiler, a compiler that fails, or a folder that others may write to.
    """
    command, flags = compiler(), [*FLAGS, *extra]
    folder = folder or cache_folder()
    _make_private(folder)
    target = folder / f"{_name(command, flags)}.so"
    if target.is_symlink() or (target.exists() and target.stat().st_uid != os.getuid()):
        raise BuildError(f"{target} is a link or belongs to another user: remove it")
    if not _is_whole(target):
        try:
            _compile(command, flags, list(extra), target)
        except OSError as error:
            raise BuildError(
                f"cannot write to {folder}: {error.strerror}; set XDG_CACHE_HOME to a writable folder"
            ) from error
    return target


def _make_private(folder: Path) -> None:
    """What is loaded from here runs as us, so nobody else may write here."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        state = folder.stat()
    except OSError as error:
        raise BuildError(
            f"cannot use {folder}: {error.strerror}; set XDG_CACHE_HOME to a writable folder"
        ) from error
    if state.st_uid != os.getuid():
        raise BuildError(f"{folder} belongs to another user: set XDG_CACHE_HOME to a folder of your own")
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(f"{folder} may be written by others: chmod 700 it, or set XDG_CACHE_HOME")


def _name(command: list[str], flags: list[str]) -> str:
    digest = hashlib.sha256("\0".join([*command, "", *flags]).encode())
    digest.update(_run([*command, "--version"]).encode())
    digest.update(_processor().encode())
    for source in sorted([*SOURCES.glob("*.c"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:32]


def _is_whole(library: Path) -> bool:
    """Whether the file is there and its digest stands behind it."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kept = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kept)}))


def _compile(command: list[str], flags: list[str], extra: list[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = []
        for source in sorted(SOURCES.glob("*.c")):
            objects.append(str(Path(scratch) / f"{source.stem}.o"))
            _run([*command, *flags, "-c", str(source), "-o", objects[-1]])
        # Linked without -fopenmp: see the module's docstring.
        made = Path(scratch) / "kernels.so"
        _run([*command, *extra, "-shared", "-o", str(made), *objects, "-lm"])
        made.write_bytes((content := made.read_bytes()) + hashlib.sha256(content).digest())
        made.replace(target)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise BuildError(f"{command[0]} refused the kernels: {first.strip()[:200]}")
    return done.stdout
