"""The same set-up for a container image, in parts that become layers of their own.

Write `python -m tools.set_up.image PART`, with the parts

    engine, ours            .venv with vLLM's CPU stack and all that our packages require; then our packages,
                            from their sources and without an index
    requirements, packages  the same two for an image that has vLLM: into the Python that runs this

The first of each pair reads the two pyproject.toml alone, so a change of sources leaves its layer as it is.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import distributions, version
from pathlib import Path

from . import preflight, state
from .command import LOG, pip, run
from .failures import SetUpError, sentence
from .steps import create_environment, cure, install_engine, verify

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("cluster", "s3", "zstd")
BUILD = ("setuptools>=77", "setuptools-scm>=8")  # build our packages; installed, so that no index is asked
OURS = ("--no-index", "--no-deps", "--no-build-isolation", ".", "./plugins")
PRETEND = "SETUPTOOLS_SCM_PRETEND_VERSION"  # an image is built without git's metadata
COMPILED = (
    "vllm",
    "torch",
    "ray",
    "transformers",
)  # imported at every start, by a user who may not write there


def requirements(root: Path) -> list[str]:
    """What our packages require from others, with the extras that a cluster uses."""
    library = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    plugins = tomllib.loads((root / "plugins" / "pyproject.toml").read_text())["project"]
    extras = library["optional-dependencies"]
    found = [*library["dependencies"], *plugins["dependencies"]]
    found += [one for name in EXTRAS for one in extras[name]]
    return [one for one in found if not one.startswith("vllm-deepinfer")]


def engine(root: Path) -> None:
    """Build .venv with everything but our own packages."""
    preflight.check(root)
    create_environment(root)
    say(f"installing vLLM's CPU stack for Python {platform.python_version()}, and what we require")
    install_engine(root, *requirements(root), *BUILD)
    cure(root)
    say("compiling what every start imports")
    packages = state.venv_python(root).parent.parent / "lib"
    folders = [str(folder) for name in COMPILED for folder in packages.glob(f"*/site-packages/{name}")]
    run(root, str(state.venv_python(root)), "-m", "compileall", "-q", "-j", "0", *folders)


def ours(root: Path) -> None:
    """Our packages into .venv; then all of it must fit together and start."""
    if not state.venv_python(root).exists():
        raise SetUpError("there is no .venv: run the part engine first.")
    pip(root, "install", *OURS)
    verify(root)


def into_this_python(root: Path) -> None:
    """What we require, without changing anything that is there: the image's vLLM was built for it."""
    extra = tomllib.loads((root / "plugins" / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    vllm, *others = extra["cuda"]
    wanted = vllm.partition("==")[2]
    if version("vllm").partition("+")[0] != wanted:
        raise SetUpError(f"this image has vLLM {version('vllm')}, and the plugins are for {wanted}.")
    kept = root / ".cache" / "constraints.txt"
    kept.write_text("".join(f"{name}=={number}\n" for name, number in sorted(installed().items())))
    say(f"installing what we require beside vLLM {wanted}")
    this_pip(root, "install", "--constraint", str(kept), *requirements(root), *others, *BUILD)


def packages(root: Path) -> None:
    """Our packages into this Python."""
    this_pip(root, "install", *OURS)


def installed() -> dict[str, str]:
    """Name → version of what this Python has; a version that no index knows ("1.2+local") stays out."""
    found = {one.metadata["Name"]: one.version for one in distributions() if one.metadata["Name"]}
    return {name: number for name, number in found.items() if "+" not in number}


def this_pip(root: Path, *arguments: str) -> None:
    """pip of the Python that runs this. Raises: SetUpError."""
    status, output = run(root, sys.executable, "-m", "pip", *arguments)
    if status:
        raise SetUpError(sentence(output, LOG))


def say(line: str) -> None:
    """Progress."""
    print(f"      {line}", flush=True)


PARTS: dict[str, Callable[[Path], None]] = {
    "engine": engine,
    "ours": ours,
    "requirements": into_this_python,
    "packages": packages,
}


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Exit status: 0, 1 after a failure told in one sentence, 2 for a part that does not exist."""
    if len(arguments) != 1 or arguments[0] not in PARTS:
        print(f"Write one of {', '.join(PARTS)}.", file=sys.stderr)
        return 2
    scratch = root / ".cache" / "tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    (root / LOG).touch()
    os.environ.setdefault(PRETEND, "0.1.0")
    try:
        PARTS[arguments[0]](root)
    except SetUpError as error:
        print((root / LOG).read_text(errors="replace")[-4000:], file=sys.stderr)
        print(f"Set-up failed: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
