"""Reports: the JSON form of the design, written whole or not at all, and a table that hides nothing."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console

from vllm_deepinfer.bench.report import Figure, Machine, Report

MACHINE = Machine(
    system="Linux x86_64", cpu="Example CPU", cores=2, memory_gib=24.0, accelerators=(), python="3.11.7"
)


def report(*figures: Figure) -> Report:
    return Report(
        name="model",
        commit="0" * 40,
        machine=MACHINE,
        settings={"hidden": 512, "batch": [1, 8]},
        rounds=3,
        figures=figures or (Figure.measured("decode_ratio_b1", [0.5, 1.25, 2.0], "ratio", ">= 1.0"),),
        series={"decode": {"batch": [1, 8], "tokens_per_second": [27.0, 161.0]}},
    )


def test_the_file_has_the_one_form(tmp_path: Path) -> None:
    report(
        Figure.measured("decode_ratio_b1", [0.5, 1.25, 2.0], "ratio", ">= 1.0"),
        Figure.missing("setup_seconds", "s", "not measured by this command", "< 360"),
    ).write(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == {
        "name": "model",
        "commit": "0" * 40,
        "machine": {
            "system": "Linux x86_64",
            "cpu": "Example CPU",
            "cores": 2,
            "memory_gib": 24.0,
            "accelerators": [],
            "python": "3.11.7",
        },
        "settings": {"hidden": 512, "batch": [1, 8]},
        "rounds": 3,
        "figures": [
            {
                "name": "decode_ratio_b1",
                "value": 1.25,
                "unit": "ratio",
                "target": ">= 1.0",
                "holds": True,
                "spread": [0.5, 2.0],
                "reason": None,
            },
            {
                "name": "setup_seconds",
                "value": None,
                "unit": "s",
                "target": "< 360",
                "holds": None,
                "spread": None,
                "reason": "not measured by this command",
            },
        ],
        "series": {"decode": {"batch": [1, 8], "tokens_per_second": [27.0, 161.0]}},
    }


def test_a_written_report_can_be_read_back(tmp_path: Path) -> None:
    report().write(tmp_path / "report.json")
    assert Report.model_validate_json((tmp_path / "report.json").read_text()) == report()


def test_writing_replaces_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("old")
    report().write(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["name"] == "model"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "report.json").write_text("old")
    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        report().write(tmp_path / "report.json")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("report.json", "old")]


def test_two_figures_of_one_name_are_refused() -> None:
    figure = Figure.measured("ttft", [1.0], "s")
    with pytest.raises(ValidationError, match="more than one figure is named ttft"):
        report(figure, figure)


def test_no_rounds_and_unknown_fields_are_refused() -> None:
    good = report().model_dump()
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        Report.model_validate(good | {"rounds": 0})
    with pytest.raises(ValidationError, match="Extra inputs"):
        Report.model_validate(good | {"figure": []})


def test_commit_and_machine_are_filled_in() -> None:
    filled = Report(name="x", settings={}, rounds=1, figures=())
    assert filled.machine == Machine.here()
    assert filled.commit


def table_of(*figures: Figure) -> str:
    console = Console(file=io.StringIO(), width=160)
    report(*figures).finish(None, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(table: str, name: str) -> list[str]:
    line = next(line for line in table.splitlines() if name in line)
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_the_table_shows_value_spread_target_and_verdict() -> None:
    table = table_of(Figure.measured("ttft", [1.0, 2.0, 9.0], "s", "< 1.5"))
    assert row(table, "ttft") == ["ttft", "2", "s", "1 to 9", "< 1.5", "NO"]
    assert "Example CPU, 2 cores; 3 rounds" in table
    assert "0" * 40 in table


def test_the_table_says_why_a_value_is_missing() -> None:
    table = table_of(Figure.missing("setup_seconds", "s", "not measured here"))
    assert row(table, "setup_seconds") == ["setup_seconds", "–", "s", "not measured here", "", ""]


def test_finish_writes_the_file_only_when_asked(tmp_path: Path) -> None:
    report().finish(tmp_path / "a.json", Console(file=io.StringIO()))
    report().finish(None, Console(file=io.StringIO()))
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
