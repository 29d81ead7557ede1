"""`vllm-deepinfer check` as a user runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.recipes.samples import RECIPES
from vllm_deepinfer.cli import run
from vllm_deepinfer.recipes.cluster_view import ClusterView, NodeView
from vllm_deepinfer.recipes.inspect import inspect_recipe
from vllm_deepinfer.recipes.summary import summary

FILES = {path.stem: str(path) for path in RECIPES}


def test_a_sound_recipe_shows_what_it_would_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert run(["check", FILES["gb200-64"]]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "gb200-64: deepseek-v4.1-flash on no cluster looked at" in out
    assert "64, in gangs of 64" in out
    assert "16 CPU, 1 GPU, 64 GiB of memory, pool=decode" in out
    assert "127.0.0.1 port 8000 to 8007" in out


def test_faults_are_told_one_per_line_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("name: bad\nmodel: {tiny: {}}\npools: {p: {role: prefill, replicas: 500}}\n")
    assert run(["check", str(file), "--cluster", "local"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0] == (
        f"vllm-deepinfer: {file}: line 3: pools has a prefill pool and no decode pool: add one of the role "
        "decode."
    )
    assert lines[1].startswith(f"{file}: line 3: pools.p needs 500 CPU at the start (500 bundles of 1), but")
    assert len(lines) == 2


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["check", str(tmp_path / "no.yaml")]) == 2
    assert capsys.readouterr().err == f"vllm-deepinfer: {tmp_path}/no.yaml: there is no such file.\n"


def test_a_recipe_for_a_cluster_is_checked_against_this_machine_only_when_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["check", FILES["h200-8"]]) == 0
    assert run(["check", FILES["h200-8"], "--cluster", "local"]) == 2
    assert "pools.aggregated: no node can hold a bundle" in capsys.readouterr().err


def test_without_ray_a_cluster_cannot_be_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(["check", FILES["h200-8"], "--cluster", "auto"]) == 2
    assert capsys.readouterr().err.startswith("vllm-deepinfer: --cluster auto needs Ray: pip install")


def test_the_table_has_a_row_per_pool_and_one_for_the_gateways() -> None:
    view = ClusterView((NodeView("n", 4, memory_gib=16),))
    recipe, _ = inspect_recipe(FILES["laptop-simulated"], lambda ray: view)
    table = summary(recipe, view)
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["prefill", "decode", "gateway"]
    assert cells[3] == ["2", "1 to 3, first 2", "1 on the head"]
    assert cells[4] == ["0.25 CPU", "0.25 CPU", "127.0.0.1 port 8000"]
    assert cells[5] == ["131,072 tokens", "131,072 tokens", ""]
    recipe, _ = inspect_recipe(FILES["laptop"], lambda ray: view)
    assert next(iter(summary(recipe, view).columns[5].cells)) == "0.25 GiB (< 932,067 tokens)"
