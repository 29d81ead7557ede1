"""Numbers that the processes of a node share out: who has one, and what is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_deepinfer.cluster.application import slots
from vllm_deepinfer.errors import UserError

ROOT = Path(__file__).parents[3]
HOLDER = """
import sys, vllm_deepinfer.cluster.application.slots as slots
print(slots.claim_slot("t"), flush=True)
sys.stdin.read()
slots.release_slots()
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(slots, "_held", {})
    yield tmp_path / f"vllm-deepinfer-{os.getuid()}"
    slots.release_slots()


def holder(tmp_path: Path, slot: int) -> subprocess.Popen[str]:
    """Another process, which has that slot."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == f"{slot}\n"
    return process


def test_slots_of_other_processes_are_taken_until_these_end(tmp_path: Path, folder: Path) -> None:
    first, second = holder(tmp_path, 0), holder(tmp_path, 1)
    assert slots.claim_slot("t") == 2
    assert slots.claim_slot("another series") == 0
    first.kill()
    first.wait()
    assert slots.claim_slot("t") == 0
    second.communicate("")
    assert not (folder / "t-1.lock").exists(), "it ended in good order"
    assert slots.claim_slot("t") == 1


def test_what_killed_processes_left_is_removed_with_their_session(folder: Path) -> None:
    for series in ("s1-main", "s1-other", "s2-main", "nixl-7000"):
        slots.claim_slot(series)
    slots._held.clear()
    slots.forget_slots("s1")
    assert sorted(file.name for file in folder.iterdir()) == ["nixl-7000-0.lock", "s2-main-0.lock"]


def test_somebody_else_s_folder_is_not_used(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="belongs to somebody else"):
        slots.claim_slot("t")
    slots.forget_slots("s1")
