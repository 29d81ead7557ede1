"""The stamp: what makes a set-up stale, and what a killed one leaves behind."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tools.set_up import state

TEXT = """\
[project]
dependencies = ["a>=1"]

[tool.ruff]
line-length = 110
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with the files that the stamp reads, and an environment that looks complete."""
    return checkout(tmp_path / "checkout")


def checkout(root: Path) -> Path:
    for file in (
        "pyproject.toml",
        "plugins/pyproject.toml",
        "tools/vllm_metadata/pyproject.toml",
        "tools/set_up/a.py",
    ):
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEXT)
    python = state.venv_python(root)
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    return root


def test_without_a_stamp_nothing_is_current_or_reusable(root: Path) -> None:
    assert (state.is_current(root), state.is_reusable(root)) == (False, False)


@pytest.mark.parametrize(
    ("written", "current", "reusable"),
    [("done", True, True), ("failed", False, True), ("running", False, False)],
)
def test_what_each_state_means(written: state.State, current: bool, reusable: bool, root: Path) -> None:
    state.write(root, written)
    assert (state.is_current(root), state.is_reusable(root)) == (current, reusable)


@pytest.mark.parametrize(
    "file",
    ["pyproject.toml", "plugins/pyproject.toml", "tools/vllm_metadata/pyproject.toml", "tools/set_up/a.py"],
)
def test_a_changed_input_makes_it_stale_but_reusable(file: str, root: Path) -> None:
    state.write(root, "done")
    (root / file).write_text(TEXT.replace("a>=1", "a>=2"))
    assert (state.is_current(root), state.is_reusable(root)) == (False, True)


@pytest.mark.parametrize("old_and_new", [("110", "120"), ("[project]", "# a comment\n[project]")])
def test_settings_of_linters_and_comments_make_nothing_stale(
    old_and_new: tuple[str, str], root: Path
) -> None:
    state.write(root, "done")
    (root / "pyproject.toml").write_text(TEXT.replace(*old_and_new))
    assert state.is_current(root)


def test_what_setuptools_reads_makes_it_stale(root: Path) -> None:
    state.write(root, "done")
    (root / "pyproject.toml").write_text(TEXT + "[tool.setuptools]\npackages = []\n")
    assert not state.is_current(root)


def test_a_new_set_up_file_makes_it_stale(root: Path) -> None:
    state.write(root, "done")
    (root / "tools" / "set_up" / "b.py").write_text("")
    assert not state.is_current(root)


def test_other_files_do_not_matter(root: Path) -> None:
    state.write(root, "done")
    (root / "README.md").write_text("new")
    assert state.is_current(root)


def test_another_python_needs_another_environment(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state.write(root, "done")
    monkeypatch.setattr(platform, "python_version", lambda: "3.12.99")
    assert (state.is_current(root), state.is_reusable(root)) == (False, False)


def test_a_moved_checkout_needs_another_environment(root: Path) -> None:
    state.write(root, "done")
    moved = root.with_name("moved")
    root.rename(moved)
    assert (state.is_current(moved), state.is_reusable(moved)) == (False, False)


def test_a_vanished_interpreter_needs_another_environment(root: Path) -> None:
    state.write(root, "done")
    state.venv_python(root).unlink()
    assert (state.is_current(root), state.is_reusable(root)) == (False, False)


@pytest.mark.parametrize("text", ["", "{", "[]", '"done"', '{"state": "done"}'])
def test_a_damaged_stamp_counts_as_none(text: str, root: Path) -> None:
    (root / ".venv" / "set-up.json").write_text(text)
    assert (state.is_current(root), state.is_reusable(root)) == (False, False)


def test_writing_leaves_only_the_stamp(root: Path) -> None:
    state.write(root, "running")
    state.write(root, "done")
    assert sorted(path.name for path in (root / ".venv").iterdir()) == ["bin", "set-up.json"]
    assert state.read(root)["python"] == platform.python_version()
