"""Finds a benchmark by name. Benchmarks register by entry point, so a name costs no import until it runs.

A distribution offers one in its pyproject.toml:

    [project.entry-points."vllm_deepinfer.bench"]
    model = "vllm_deepinfer_plugins.bench.model:run"

where `run(quick: bool, json: Path | None) -> int` prints the table of its `Report`, writes it to `json`, and
returns the exit status.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path

from vllm_deepinfer.errors import UserError

GROUP = "vllm_deepinfer.bench"
PLUGINS = "vllm-deepinfer-plugins"

Benchmark = Callable[[bool, Path | None], int]


def installed() -> dict[str, EntryPoint]:
    """The benchmarks of every installed distribution by name."""
    return {point.name: point for point in entry_points(group=GROUP)}


def run(name: str, quick: bool, json: Path | None) -> int:
    """Run one benchmark. UserError, before anything runs, for a name, folder or package that is not there."""
    benchmark = find(name, installed())
    if json is not None:
        check_writable(json)
    function = load(benchmark)
    # As Ctrl-C does, so that the processes that a benchmark starts end with it.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return function(quick, json)
    finally:
        signal.signal(signal.SIGTERM, before)


def find(name: str, benchmarks: Mapping[str, EntryPoint]) -> EntryPoint:
    """The benchmark of that name; UserError names the nearest one there is."""
    if name in benchmarks:
        return benchmarks[name]
    nearest = difflib.get_close_matches(name, benchmarks, n=1, cutoff=0.0)
    hint = f"; the nearest is {nearest[0]!r}" if nearest else ""
    if not _is_installed(PLUGINS):
        hint += f"; those that run vLLM come with {PLUGINS}, which is not installed"
    raise UserError(f"No benchmark is named {name!r}{hint}.")


def load(benchmark: EntryPoint) -> Benchmark:
    """Import the benchmark's function; UserError names a package that it needs and this machine lacks."""
    try:
        function: Benchmark = benchmark.load()
        return function
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "vllm_deepinfer", "vllm_deepinfer_plugins"):
            raise  # a module of ours that is missing is our fault
        raise UserError(
            f"The benchmark {benchmark.name!r} needs the package {package!r}, which is not installed here."
        ) from None


def check_writable(path: Path, name: str = "--json") -> None:
    """UserError unless a report can be written to `path`: better said before the benchmark than after it.

    `name` is what the user calls the path.
    """
    if path.is_dir():
        raise UserError(f"{name} {path} is a folder; name a file.")
    if not path.parent.is_dir():
        raise UserError(f"{name} {path}: there is no folder {path.parent}.")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{name} {path}: the folder {path.parent} cannot be written.")


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True
