"""The command with a stand-in for the engine: what is written, what is shown, and how mistakes end."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from vllm_deepinfer_plugins.verification.calibrate import command
from vllm_deepinfer_plugins.verification.calibrate.command import judged
from vllm_deepinfer_plugins.verification.calibrate.run import Recorded, Traffic

from tests.policy.calibration_traffic import verified_rounds
from vllm_deepinfer import cli
from vllm_deepinfer.checkpoint.options import TinyOptions
from vllm_deepinfer.checkpoint.tiny import write_checkpoint
from vllm_deepinfer.policy.calibration import Calibration, loads
from vllm_deepinfer.policy.calibration_errors import Records

TARGET, DRAFTER = "sha256:0", "custom_class:a.P"


def keys_of(records: Records) -> list[str]:
    """Forty rounds of each request."""
    return [f"r{row // 40}" for row in range(len(records.verified))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "m", TinyOptions(dspark_blocks=3)).folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Traffic]:
    """What the engine was asked. It accepts as a drafter that is too sure would see it."""
    seen: list[Traffic] = []

    def record(
        folder: Path, drafter: str, drafts: int, traffic: Traffic, progress: Callable[[int], None]
    ) -> Recorded:
        seen.append(traffic)
        for done in range(len(traffic.prompts)):
            progress(done + 1)
        records = verified_rounds(8_000, 1.8, seed=1, positions=drafts)
        return Recorded(keys_of(records), records, TARGET, DRAFTER)

    monkeypatch.setattr(command, "record", record)
    return seen


def test_what_is_written_is_what_an_engine_reads(
    model: Path, asked: list[Traffic], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "calibration.json"
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("[20, 21]\n[22]\n[23]\n")
    arguments = ["--model", str(model), "--prompts", str(prompts), "--tokens", "9", "--temperature", "0"]
    assert cli.run(["calibrate", str(out), *arguments]) == 0
    found = loads(out.read_text(), TARGET, DRAFTER)
    assert len(found.temperatures) == 5 and found.temperatures[0] == pytest.approx(1.8, rel=0.25)
    assert asked == [Traffic([[20, 21], [22], [23]], 9, 0.0, 32)]
    shown = capsys.readouterr()
    assert str(out) in shown.out.replace("\n", "") and "before" in shown.out
    assert "3/3" in shown.err, "a bar on standard error"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_halves_are_of_requests_and_the_other_half_judges() -> None:
    records = verified_rounds(16_000, 1.8, seed=2)
    found = judged(keys_of(records), records)
    assert sum(found.after.counts[:1]) == pytest.approx(8_000, abs=40)
    assert found.before.mean_survival > 0.05 > 0.02 > found.after.mean_survival


def test_what_would_be_worse_on_the_other_half_is_not_kept() -> None:
    """One half of the requests is calibrated, the other, by chance all of those that fit, is not."""
    hot, right = verified_rounds(4_000, 3.0, seed=3), verified_rounds(4_000, 1.0, seed=4)
    keys = keys_of(hot)
    requests = sorted(set(keys))
    random.Random(0).shuffle(requests)
    fitting = np.array([key in set(requests[: len(requests) // 2]) for key in keys])
    mixed = Records(
        np.where(fitting[:, None], hot.confidences, right.confidences),
        np.where(fitting, hot.verified, right.verified),
        np.where(fitting, hot.accepted, right.accepted),
    )
    found = judged(keys, mixed)
    assert found.calibration == Calibration.identity(5) and found.after == found.before


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.run(["calibrate", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    return shown.err


def test_mistakes_are_one_sentence_and_status_2(
    model: Path, asked: list[Traffic], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, given = str(tmp_path / "c.json"), ["--model", str(model)]
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("[1]\n[9999]\n")
    assert "is a folder; name a file" in refused([str(tmp_path), *given], capsys)
    assert "line 2: the token id 9999" in refused([out, *given, "--prompts", str(prompts)], capsys)
    prompts.write_text("[1]\n")
    assert "One prompt is not enough" in refused([out, *given, "--prompts", str(prompts)], capsys)
    assert "config.json" in refused([out, "--model", str(tmp_path)], capsys)
    plain = write_checkpoint(tmp_path / "plain", TinyOptions()).folder
    assert "no DSpark blocks to draft with" in refused([out, "--model", str(plain)], capsys)
    assert "--tokens" in refused([out, *given, "--tokens", "1"], capsys)
    assert asked == [] and not Path(out).exists()


def test_without_the_plugins_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda **_: ())
    assert "comes with vllm-deepinfer-plugins" in refused(["c.json"], capsys)
