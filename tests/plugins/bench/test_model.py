"""The report has every figure that the issue names, whatever could be measured."""

from __future__ import annotations

import io
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console
from vllm_deepinfer_plugins.bench import model
from vllm_deepinfer_plugins.bench.engine_process import EngineFailed
from vllm_deepinfer_plugins.bench.rounds import Pair
from vllm_deepinfer_plugins.bench.worker import OURS, REPAIRED
from vllm_deepinfer_plugins.bench.workload import Measurement

from vllm_deepinfer.errors import UserError

NAMED_BY_THE_ISSUE = [
    "decode_ratio_b1",
    "decode_ratio_b8",
    "prefill_ratio_2048",
    "setup_seconds",
    "first_token_seconds",
]
QUIET = Console(file=io.StringIO())


def pairs(ours: list[int], other: list[int]) -> list[Pair]:
    return [
        Pair({OURS: Measurement(a, 1.0, 0.0), REPAIRED: Measurement(b, 1.0, 0.0)})
        for a, b in zip(ours, other, strict=True)
    ]


MEASURED = {
    "decode_b1": pairs([90, 80, 130], [60, 80, 100]),
    "decode_b8": pairs([300, 300, 300], [400, 600, 500]),
    "prefill_2048": pairs([10, 10, 10], [10, 10, 10]),
}


class FakeEngine:
    """Stands in for EngineProcess: what it is to do on start and on a check is given per side."""

    broken: ClassVar[dict[str, str]] = {}
    wrong: ClassVar[dict[str, list[str]]] = {}
    neighbours = 0.0

    def __init__(self, side: str, command: list[str]) -> None:
        self.side, self.state = side, {"threads": 2}
        assert Path(command[-1]).joinpath("config.json").is_file()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait_until_up(self) -> None:
        if self.side in self.broken:
            raise EngineFailed(self.broken[self.side])

    def ask(self, do: str, **arguments: Any) -> Any:
        if do == "check":
            return self.wrong.get(self.side, [])
        if do == "profile":
            return {"seconds": 1.0, "operators": [], "arguments": arguments}
        speed = {OURS: 2, REPAIRED: 1}[self.side]
        tokens = arguments.get("tokens") or arguments["batch"] * (arguments["outputs"] - 1)
        return {"tokens": tokens * speed, "seconds": 1.0, "foreign": self.neighbours, "fastest_step": 0.5}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    def write(folder: Path, options: object) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    class Fresh(FakeEngine):
        broken: ClassVar[dict[str, str]] = {}
        wrong: ClassVar[dict[str, list[str]]] = {}

    monkeypatch.setattr(model, "write_checkpoint", write)
    monkeypatch.setattr(model, "EngineProcess", Fresh)
    return Fresh


def test_ratios_are_medians_of_paired_rounds() -> None:
    found = {figure.name: figure for figure in model.figures(MEASURED, {})}
    assert list(found)[:5] == [
        "decode_ratio_b1",
        "decode_ratio_b8",
        "prefill_ratio_2048",
        *NAMED_BY_THE_ISSUE[3:],
    ]
    assert (found["decode_ratio_b1"].value, found["decode_ratio_b1"].spread) == (1.3, (1.0, 1.5))
    assert found["decode_ratio_b1"].holds is True
    assert (found["decode_ratio_b8"].value, found["decode_ratio_b8"].holds) == (0.6, False)
    assert (found["prefill_ratio_2048"].value, found["prefill_ratio_2048"].holds) == (1.0, True)
    assert found["decode_b1_ours"].value == 90 and found["decode_b1_vllm_v4"].value == 80
    assert found["decode_b8_vllm_v4"].spread == (400, 600)


def test_what_is_not_measured_is_null_with_a_reason() -> None:
    found = {figure.name: figure for figure in model.figures(MEASURED, {})}
    for name in ("setup_seconds", "first_token_seconds"):
        assert found[name].value is None and "make serve" in str(found[name].reason)


def test_a_side_that_failed_leaves_its_figures_null_and_the_other_side_measured() -> None:
    one_side = {
        name: [Pair({REPAIRED: p.sides[REPAIRED]}) for p in taken] for name, taken in MEASURED.items()
    }
    found = {figure.name: figure for figure in model.figures(one_side, {OURS: "ours has no class"})}
    assert set(NAMED_BY_THE_ISSUE) <= set(found)
    assert found["decode_ratio_b1"].value is None and found["decode_ratio_b1"].reason == "ours has no class"
    assert found["decode_ratio_b1"].target == ">= 1.0" and found["decode_ratio_b1"].holds is None
    assert found["prefill_2048_ours"].value is None
    assert found["decode_b8_vllm_v4"].value == 500


def test_the_tasks_are_those_of_the_issue() -> None:
    assert {task.name: (task.do, task.arguments) for task in model.tasks_of(outputs=33)} == {
        "decode_b1": ("decode", {"batch": 1, "context": 512, "outputs": 33}),
        "decode_b8": ("decode", {"batch": 8, "context": 512, "outputs": 33}),
        "prefill_2048": ("prefill", {"tokens": 2048}),
    }


@pytest.mark.parametrize("quick", [True, False])
def test_run_writes_the_report(
    quick: bool, engines: type[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert model.run(quick, tmp_path / "report.json") == 0
    report = json.loads((tmp_path / "report.json").read_text())
    found = {figure["name"]: figure for figure in report["figures"]}
    assert report["name"] == "model" and report["rounds"] == (5 if quick else 15)
    assert set(NAMED_BY_THE_ISSUE) <= set(found)
    assert found["decode_ratio_b8"]["value"] == 2.0 and found["decode_ratio_b8"]["holds"] is True
    assert found["prefill_2048_ours"]["value"] == 4096.0
    assert set(report["series"]["profile"]) == {OURS, REPAIRED}
    assert len(report["series"]["rounds"]["decode_b1"]["foreign_cpu_share"]) == report["rounds"]
    assert report["settings"]["models"][REPAIRED]["compress_ratios"] == [0, 4, 128, 4]
    printed = capsys.readouterr()
    assert "decode_ratio_b1" in printed.out and "round 5 of" in printed.err
    assert "other processes" not in printed.err


def test_neighbours_are_told(
    engines: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engines, "neighbours", 0.4)
    assert model.run(True, None) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "other processes used the cores during 15 of 15 measurements" in told


def test_run_without_our_class_still_measures_the_other(engines: type[FakeEngine], tmp_path: Path) -> None:
    engines.broken[OURS] = "engine 'ours' failed at 'start': no class"
    assert model.run(True, tmp_path / "report.json") == 0
    report = json.loads((tmp_path / "report.json").read_text())
    found = {figure["name"]: figure for figure in report["figures"]}
    assert found["decode_ratio_b1"]["value"] is None
    assert found["decode_ratio_b1"]["reason"] == "engine 'ours' failed at 'start': no class"
    assert found["decode_b1_vllm_v4"]["value"] == 32.0


def test_an_engine_with_wrong_answers_is_not_measured(engines: type[FakeEngine], tmp_path: Path) -> None:
    engines.wrong[REPAIRED] = ["the answer ignores the distant context"]
    with ExitStack() as stack:
        models = model.write_models(tmp_path, QUIET)
        working, faults = model.start_engines(models, stack, QUIET)
    assert list(working) == [OURS]
    assert faults == {
        REPAIRED: "engine 'vllm_v4' gives wrong answers: the answer ignores the distant context"
    }


def test_nothing_to_measure_is_the_users_to_know(engines: type[FakeEngine], tmp_path: Path) -> None:
    engines.broken |= {OURS: "runs on cuda", REPAIRED: "runs on cuda"}
    with pytest.raises(UserError, match="can measure nothing here: runs on cuda"):
        model.run(True, None)
