"""A user's mistake in one sentence, also when only an engine's process can see it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError, create_model
from vllm_deepinfer_plugins import cli_errors

from tests.plugins.tiny_qwen3 import write_tiny_qwen3
from vllm_deepinfer.errors import UserError


def test_our_error_is_found_in_a_chain() -> None:
    try:
        try:
            raise UserError("Say A instead of B.")
        except UserError as error:
            raise RuntimeError("wrapped") from error
    except RuntimeError as error:
        assert cli_errors.sentence_of(error) == "Say A instead of B."
    assert cli_errors.sentence_of(RuntimeError("other")) is None
    assert cli_errors.sentence_of(None) is None


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"num_speculative_tokens": 0}, " has num_speculative_tokens 0: input should be greater than 0"),
        ({"num_speculative_tokens": "five"}, " has num_speculative_tokens 'five': input should be a valid"),
        ({}, ": num_speculative_tokens must be provided with speculative model unless"),
        ({"num_speculative_token": 5}, " has num_speculative_token 5: unexpected keyword argument"),
    ],
)
def test_what_vllm_finds_wrong_about_a_flag_of_ours(given: dict[str, object], sentence: str) -> None:
    from vllm.config import SpeculativeConfig

    with pytest.raises(ValidationError) as error:
        SpeculativeConfig(method="custom_class", model="a.Proposer", **given)  # type: ignore[arg-type]
    found = cli_errors.sentence_of(error.value)
    assert found is not None and found.startswith(f"--speculative-config{sentence}") and "\n" not in found


def test_what_others_find_wrong_is_theirs() -> None:
    with pytest.raises(ValidationError) as error:
        create_model("Other", count=(int, ...))(count="five")
    assert cli_errors.sentence_of(error.value) is None


def test_outside_an_engine_s_process_the_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cli_errors.RELAY, "/nonexistent/file")
    with pytest.raises(UserError, match="no"):
        cli_errors.refuse(UserError("no"))


def test_in_one_the_sentence_is_left_for_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    relay = tmp_path / "relay"
    relay.touch()
    monkeypatch.setenv(cli_errors.RELAY, str(relay))
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace())
    with pytest.raises(SystemExit) as ended:
        cli_errors.refuse(UserError("Say A instead of B."))
    assert ended.value.code == cli_errors.EXIT_CODE
    assert cli_errors._relayed() == "Say A instead of B."
    assert cli_errors._relayed() is None and not relay.exists()


def test_without_a_command_line_there_is_no_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cli_errors.RELAY, raising=False)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace())
    with pytest.raises(UserError, match="no"):
        cli_errors.refuse(UserError("no"))
    assert cli_errors._relayed() is None


def test_an_empty_relay_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "relay").touch()
    monkeypatch.setenv(cli_errors.RELAY, str(tmp_path / "relay"))
    assert cli_errors._relayed() is None


@pytest.mark.slow
@pytest.mark.long
def test_vllm_serve_refuses_the_wrong_scheduler_in_one_sentence(tmp_path: Path) -> None:
    """A CPU schedules synchronously, which only the engine's process learns."""
    vllm = Path(sys.executable).with_name("vllm")
    flags = ["--enforce-eager", "--max-model-len", "512", "--dtype", "float32", "--port", "0"]
    command = [str(vllm), "serve", str(write_tiny_qwen3(tmp_path / "model")), *flags]
    command += ["--scheduler-cls", "vllm_deepinfer_plugins.scheduler.AsyncTimeBudgetScheduler"]
    command += ["--additional-config", '{"deepinfer": {"itl_target_ms": 40}}']
    env = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TMPDIR": str(tmp_path)}
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 2, done.stderr[-2000:]
    said = [line for line in done.stderr.splitlines() if line.startswith("vllm: error")]
    assert said == [
        "vllm: error: vLLM schedules synchronously here, so AsyncTimeBudgetScheduler cannot be used: "
        "say --scheduler-cls vllm_deepinfer_plugins.scheduler.TimeBudgetScheduler"
    ]
    assert "Traceback" not in done.stderr + done.stdout
    assert not list(tmp_path.glob("deepinfer-refusal-*"))
