"""Figures from passes, and null figures with a reason for what could not be measured."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
from vllm_deepinfer.bench.report import Report
from vllm_deepinfer.bench.routing import report
from vllm_deepinfer.bench.routing.measure import Pass
from vllm_deepinfer.bench.routing.policies import OTHERS, OURS
from vllm_deepinfer.bench.routing.report import ROUTING, STREAMING, Parts
from vllm_deepinfer.bench.routing.rounds import Results, Shares
from vllm_deepinfer.bench.routing.streams import Cores, StreamCost


def one(ttft: float, itl: float, **counts: int) -> Pass:
    numbers = {"unfinished": 0, "lost": 0, "missing": 0, "doubled": 0, **counts}
    return Pass(ttft=[ttft], itl=[itl], tokens=10, late=0.0, **numbers)


def silent() -> Parts:
    return Parts(True, lambda text: None)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    passes = {
        OURS: [one(1.0, 0.02), one(2.0, 0.03, unfinished=1), one(3.0, 0.04)],
        **{policy: [one(4.0, 0.05, unfinished=9)] * 3 for policy in OTHERS},
    }
    passes[OTHERS[0]] = [one(2.0, 0.10, lost=1), one(2.0, 0.10, doubled=2), one(2.0, 0.10)]
    shares = {policy: [Shares(0.2, 0.4, 1.0)] * 3 for policy in passes}

    @contextmanager
    def running(*arguments: object) -> Any:
        yield SimpleNamespace()

    monkeypatch.setattr(report, "running", running)
    monkeypatch.setattr(report, "compare", lambda *arguments: Results(passes, shares))
    monkeypatch.setattr(report, "_backlog", lambda *arguments: (10.0, 9.0, 1))
    made = silent()
    report._pools(made, Path(), Path())
    return made


def test_every_figure_of_the_routing_part_has_its_name_and_unit(parts: Parts) -> None:
    assert [(one.name, one.unit, one.target) for one in parts.figures] == ROUTING


def test_each_ratio_has_its_own_best_policy(parts: Parts) -> None:
    ttft, itl = parts.figures[:2]
    assert (ttft.value, ttft.spread, ttft.holds) == (1.0, (0.5, 1.5), False)
    assert itl.value == pytest.approx(0.6) and itl.holds
    assert parts.series["best_other_of_p99_ttft_ratio_vs_best_policy"] == OTHERS[0]
    assert parts.series["best_other_of_p99_itl_ratio_vs_best_policy"] == OTHERS[1]


def test_balance_is_the_offline_time_over_ours(parts: Parts) -> None:
    assert parts.figures[2].value == pytest.approx(0.9) and parts.figures[2].holds


def test_what_is_lost_anywhere_counts_and_what_ours_did_not_end(parts: Parts) -> None:
    lost, doubled = parts.figures[3:]
    # One of round robin's, one of ours that did not end, one of the backlog; not the others' unfinished.
    assert (lost.value, lost.holds) == (3, False)
    assert (doubled.value, doubled.holds) == (2, False)


def test_the_series_has_a_row_per_policy_and_round(parts: Parts) -> None:
    rows: Any = parts.series["policies"]
    assert set(rows) == {OURS, *OTHERS}
    assert [row["ttft_p99_s"] for row in rows[OURS]] == [1.0, 2.0, 3.0]
    assert rows[OURS][0]["busy_cores"] == {"gateway": 0.2, "replicas": 0.4, "machine": 1.0}


def test_stream_figures_take_the_engine_off_the_in_process_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = StreamCost(pools=30.0, replica=20.0, in_process=34.0, engine=10.0, tokens_per_s=12_000.0)
    assert cost.ratio == pytest.approx(30 / 24)
    assert cost.tokens_per_core == pytest.approx(33_333, abs=1)

    @contextmanager
    def system(say: object) -> Any:
        yield SimpleNamespace()

    bench = SimpleNamespace(system=system, measure=lambda running: cost)
    monkeypatch.setattr(report, "StreamBench", lambda *arguments: bench)
    parts = silent()
    report._streams(parts, Path(), Path(), Cores(1, 0), 2)
    assert [one.name for one in parts.figures] == [name for name, _, _ in STREAMING]
    assert all(one.holds for one in parts.figures)


def test_one_core_is_not_enough_for_the_streams() -> None:
    with pytest.raises(RuntimeError, match="needs two cores"):
        report._streams(silent(), Path(), Path(), Cores(0, 0), 1)


def test_a_part_that_fails_leaves_null_figures_with_the_reason() -> None:
    parts = silent()

    def part() -> None:
        parts.add(STREAMING[0], [1.0])
        raise RuntimeError("first line\nthe reason")

    parts.run("streaming", STREAMING, part)
    assert [(one.name, one.value, one.reason) for one in parts.figures] == [
        (name, None, "the reason") for name, _, _ in STREAMING
    ]
    assert parts.series["not measured: streaming"] == "the reason"


def test_a_report_is_whole_even_when_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*arguments: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(report, "make_model", lambda folder: folder)
    for name in ("_pools", "_streams", "_outside"):
        monkeypatch.setattr(report, name, fails)
    found = report.report(True)
    assert [one.name for one in found.figures] == [name for name, _, _ in (*ROUTING, *STREAMING)]
    assert all(one.value is None and one.reason == "no" for one in found.figures)
    found.write(tmp_path / "report.json")
    assert Report.model_validate_json((tmp_path / "report.json").read_bytes()) == found
    assert report.Parts(False, print).rounds == 5
