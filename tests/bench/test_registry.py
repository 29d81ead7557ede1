"""Benchmarks by name: found without an import, refused in one sentence."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from vllm_deepinfer.bench import registry
from vllm_deepinfer.errors import UserError


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, registry.GROUP)


BENCHMARKS = {name: point(name, f"somewhere.{name}:run") for name in ("gateway", "model")}


def test_find_by_name() -> None:
    assert registry.find("model", BENCHMARKS) is BENCHMARKS["model"]


@pytest.mark.parametrize(("typed", "nearest"), [("modle", "model"), ("getaway", "gateway"), ("m", "model")])
def test_an_unknown_name_is_told_the_nearest(typed: str, nearest: str) -> None:
    with pytest.raises(UserError) as error:
        registry.find(typed, BENCHMARKS)
    assert str(error.value) == f"No benchmark is named {typed!r}; the nearest is {nearest!r}."


def test_an_unknown_name_without_the_plugins_is_told_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_is_installed", lambda distribution: False)
    with pytest.raises(UserError) as error:
        registry.find("model", {})
    assert str(error.value) == (
        "No benchmark is named 'model'; those that run vLLM come with vllm-deepinfer-plugins, "
        "which is not installed."
    )


def module(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)


def test_load_gives_the_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(tmp_path, "bench_a", "def run(quick, json):\n    return 7 if quick else 3\n", monkeypatch)
    assert registry.load(point("a", "bench_a:run"))(True, None) == 7


def test_a_package_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(tmp_path, "bench_b", "import surely_not_installed.part\n", monkeypatch)
    with pytest.raises(UserError) as error:
        registry.load(point("b", "bench_b:run"))
    assert str(error.value) == (
        "The benchmark 'b' needs the package 'surely_not_installed', which is not installed here."
    )


def test_a_missing_module_of_ours_is_no_mistake_of_the_user() -> None:
    with pytest.raises(ModuleNotFoundError):
        registry.load(point("c", "vllm_deepinfer.bench.no_such_module:run"))


def test_run_passes_quick_and_file_and_returns_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def run(quick, json):\n    json.write_text(str(quick))\n    return 4\n"
    module(tmp_path, "bench_d", text, monkeypatch)
    monkeypatch.setattr(registry, "installed", lambda: {"d": point("d", "bench_d:run")})
    assert registry.run("d", True, tmp_path / "out.json") == 4
    assert (tmp_path / "out.json").read_text() == "True"


def test_a_file_that_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "installed", lambda: {"d": point("d", "surely_not_installed:run")})
    for file, sentence in (
        (tmp_path, f"--json {tmp_path} is a folder; name a file."),
        (tmp_path / "no" / "r.json", f"--json {tmp_path}/no/r.json: there is no folder {tmp_path}/no."),
    ):
        with pytest.raises(UserError) as error:
            registry.run("d", False, file)
        assert str(error.value) == sentence


def test_a_folder_without_write_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(UserError, match=r"r\.json: the folder .* cannot be written\.$"):
        registry.check_writable(tmp_path / "r.json")


def test_every_registered_benchmark_of_ours_has_its_module() -> None:
    for benchmark in registry.installed().values():
        assert importlib.util.find_spec(benchmark.module), f"{benchmark.name} registers {benchmark.value}"


def test_listing_imports_no_benchmark() -> None:
    code = (
        "import sys; from vllm_deepinfer.bench.registry import installed; known = installed();"
        "assert {'gateway', 'model'} <= set(known), known;"
        "assert not [point for point in known.values() if point.module in sys.modules];"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
