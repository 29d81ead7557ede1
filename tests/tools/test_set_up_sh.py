"""`tools/set_up.sh` with played interpreters: the first Python in range runs, or it says which would do."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "set_up.sh"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A PATH with nothing but what the script itself needs."""
    for tool in ("sh", "dirname"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
    return tmp_path


def interpreter(path: Path, name: str, version: tuple[int, int]) -> Path:
    """A played Python: it answers the version question, and says which one was asked to run the set-up."""
    in_range = (3, 11) <= version <= (3, 13)
    program = path / name
    program.write_text(
        f'#!/usr/bin/sh\nif [ "$1" = -c ]; then exit {int(not in_range)}; fi\necho {name} "$@"\n'
    )
    program.chmod(0o755)
    return program


def run(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/usr/bin/sh", str(SCRIPT)],
        env={"PATH": str(path)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_usual_python3_comes_first(path: Path) -> None:
    interpreter(path, "python3", (3, 11))
    interpreter(path, "python3.12", (3, 12))
    assert run(path).stdout == "python3 -m tools.set_up\n"


@pytest.mark.parametrize("too_old_or_new", [(2, 7), (3, 10), (3, 14)])
def test_one_out_of_range_is_passed_over(path: Path, too_old_or_new: tuple[int, int]) -> None:
    interpreter(path, "python3", too_old_or_new)
    interpreter(path, "python3.13", (3, 13))
    assert run(path).stdout == "python3.13 -m tools.set_up\n"


def test_none_is_one_sentence(path: Path) -> None:
    interpreter(path, "python3", (3, 10))
    done = run(path)
    assert done.returncode == 1
    assert done.stderr.startswith("Set-up failed: no Python 3.11, 3.12 or 3.13 on PATH; install one")
    assert done.stderr.count("\n") == 1


def test_python_names_one_even_with_a_space_in_its_path(path: Path) -> None:
    interpreter(path, "python3", (3, 11))
    named = interpreter(path, "my python", (3, 12))
    assert run(path, PYTHON=str(named)).stdout == "my python -m tools.set_up\n"


def test_a_named_python_out_of_range_is_not_replaced_in_silence(path: Path) -> None:
    interpreter(path, "python3", (3, 11))
    named = interpreter(path, "python3.9", (3, 9))
    done = run(path, PYTHON=str(named))
    assert done.returncode == 1
    assert done.stderr.startswith(f"Set-up failed: PYTHON={named} is no Python 3.11, 3.12 or 3.13")
