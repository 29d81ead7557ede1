"""What is refused before anything is downloaded."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tools.set_up import preflight
from tools.set_up.failures import DISK_GB, SetUpError


@pytest.fixture(autouse=True)
def good_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(
        shutil, "which", lambda name: f"/usr/bin/{name}" if name in ("cc", "clang-19") else None
    )
    set_free(monkeypatch, DISK_GB * 1e9)


def set_free(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(int(2e12), 0, int(free)))


def test_a_good_machine_passes(tmp_path: Path) -> None:
    preflight.check(tmp_path)


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(SetUpError, match=r"^no C compiler on PATH .* install gcc\.$"):
        preflight.check(tmp_path)


@pytest.mark.parametrize(
    ("cc", "found"), [("clang-19 -m64", "/usr/bin/clang-19"), ("icc", None), ("", "/usr/bin/cc")]
)
def test_cc_names_the_compiler(cc: str, found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", cc)
    assert preflight.compiler() == found


def test_too_little_disk_is_refused_only_for_a_first_set_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_free(monkeypatch, 2.5e9)
    with pytest.raises(SetUpError, match=rf"^2\.5 GB of disk are free in .* needs {DISK_GB} GB\.$"):
        preflight.check(tmp_path)
    (tmp_path / ".venv").mkdir()
    preflight.check(tmp_path)


def test_another_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SetUpError, match="wheels for Linux only, and this is darwin"):
        preflight.check(tmp_path)
