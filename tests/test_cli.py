"""The command line: one sentence and status 2 for a mistake, and no module loaded before it is needed."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from vllm_deepinfer import cli
from vllm_deepinfer.bench import registry
from vllm_deepinfer.errors import UserError


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == version("vllm-deepinfer") + "\n"


def test_help_names_the_sub_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in ("tiny-checkpoint", "bench"):
        assert name in shown


def test_no_sub_command_shows_the_help_and_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 2
    shown = capsys.readouterr()
    assert "tiny-checkpoint" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bnch"], ["'bnch'", "Did you mean 'bench'?"]),
        (["bench", "--quik"], ["--quik", "--quick"]),
        (["bench", "gateway", "too-much"], ["too-much"]),
        (["bench", "modle"], ["'modle'", "the nearest is 'model'"]),
        (["bench", "model", "--json", "/no/such/folder/r.json"], ["/no/such/folder/r.json"]),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("vllm-deepinfer: ")
    assert shown.err.count("\n") == 1
    for word in words:
        assert word in shown.err


def test_bench_without_a_name_lists_the_installed_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench"]) == 0
    listed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["gateway", "vllm_deepinfer.bench.gateway:run"] in listed
    assert ["model", "vllm_deepinfer_plugins.bench.model:run"] in listed


def test_bench_passes_its_options_and_returns_the_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[str, bool, Path | None]] = []

    def record(name: str, quick: bool, json: Path | None) -> int:
        calls.append((name, quick, json))
        return 5

    monkeypatch.setattr(registry, "run", record)
    assert cli.run(["bench", "model", "--quick", "--json", str(tmp_path / "r.json")]) == 5
    assert cli.run(["bench", "gateway"]) == 5
    assert calls == [("model", True, tmp_path / "r.json"), ("gateway", False, None)]


COMMAND = '''
import typer
from vllm_deepinfer.errors import UserError

def write(out: str, seed: int = typer.Option(0, help="Seed of the weights.")) -> None:
    """Write a thing."""
    if seed == 13:
        raise UserError("--seed 13 is unlucky: choose another.")
    if seed == 99:
        raise RuntimeError("a fault of ours")
    print(f"{out} with seed {seed}")
    raise typer.Exit(seed)
'''


@pytest.fixture
def sub_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the function above behind `tiny-checkpoint`."""
    (tmp_path / "a_sub_command.py").write_text(COMMAND)
    monkeypatch.syspath_prepend(tmp_path)
    real = cli.pass_on
    monkeypatch.setattr(cli, "pass_on", lambda _, context: real("a_sub_command:write", context))


@pytest.mark.usefixtures("sub_command")
def test_a_sub_command_gets_its_arguments_and_its_status_is_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["tiny-checkpoint", "here", "--seed", "3"]) == 3
    assert capsys.readouterr().out == "here with seed 3\n"


@pytest.mark.usefixtures("sub_command")
def test_a_sub_command_answers_help_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["tiny-checkpoint", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "vllm-deepinfer tiny-checkpoint" in shown
    assert "Seed of the weights." in shown


@pytest.mark.usefixtures("sub_command")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["here", "--seed", "13"], "--seed 13 is unlucky: choose another."),
        (["here", "--seed", "x"], "'--seed'"),
        (["here", "--sed", "1"], "--sed"),
        ([], "'out'"),
    ],
)
def test_mistakes_of_a_sub_command_are_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["tiny-checkpoint", *arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("vllm-deepinfer: ")
    assert shown.count("\n") == 1
    assert words in shown


@pytest.mark.usefixtures("sub_command")
def test_a_fault_of_ours_keeps_its_stack_trace() -> None:
    with pytest.raises(RuntimeError, match="a fault of ours"):
        cli.run(["tiny-checkpoint", "here", "--seed", "99"])


def test_ctrl_c_is_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "run", interrupted)
    assert cli.run(["bench", "model"]) == 130


def test_main_exits_with_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise UserError("No.")

    monkeypatch.setattr(registry, "run", refused)
    monkeypatch.setattr(sys, "argv", ["vllm-deepinfer", "bench", "model"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2


def test_starting_loads_no_sub_command() -> None:
    code = (
        "import sys, vllm_deepinfer.cli;"
        "late = ('numpy', 'fastapi', 'torch', 'vllm_deepinfer.bench', 'vllm_deepinfer.checkpoint');"
        "loaded = [name for name in late if name in sys.modules]; assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
