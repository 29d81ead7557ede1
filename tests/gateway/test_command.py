"""`vllm-deepinfer gateway` and `gateway-key` as a user types them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.gateway.harness import DATA
from vllm_deepinfer.cli import run
from vllm_deepinfer.engine import EngineDead
from vllm_deepinfer.gateway import command as module
from vllm_deepinfer.gateway.limits.keys import KeyRing, digest

pytestmark = pytest.mark.usefixtures("own_logging")

PROGRAM = str(Path(sys.executable).with_name("vllm-deepinfer"))
MODEL = ["--model", str(DATA), "--engine", "simulated"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "/no/such/folder"], "--model /no/such/folder: there is no such folder."),
        ([*MODEL, "--host", "0.0.0.0"], "give --api-keys FILE, or --allow-anonymous"),
        ([*MODEL, "--host", "example.org"], "give --api-keys FILE, or --allow-anonymous"),
        ([*MODEL, "--log-level", "loud"], "--log-level loud: choose debug"),
        ([*MODEL, "--max-active", "0"], "max_active: "),
        ([*MODEL, "--api-keys", "/none"], "/none: the key file cannot be read"),
        ([*MODEL, "--engine-args", "--speed 9"], "the simulated engine has no --speed; it has --block-size"),
        ([*MODEL, "--engine-args", "--block-size x"], "--block-size needs a number, got 'x'."),
        ([*MODEL, "--engine-args", "--block-size 0"], "the simulated engine refuses that: block_size"),
        ([*MODEL, "--engine-args", "'"], "--engine-args: no closing quotation."),
        (["--model", str(DATA.parent)], f"--model {DATA.parent} has no config.json: name the folder of a "),
        (["--model", str(DATA.parent), "--engine", "simulated"], "tokenizer.json is not a readable"),
        (["--model", str(DATA), "--engine", "warp"], "--engine warp: choose one of "),
        ([*MODEL, "--nonsense"], "No such option: --nonsense"),
    ],
)
def test_a_mistake_gets_one_sentence_and_status_2(
    arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["gateway", *arguments]) == 2
    error = capfd.readouterr().err.strip().splitlines()
    assert len(error) == 1 and says in error[0]


def test_classes_of_the_engine_s_store_are_the_gateway_s() -> None:
    classes = [{"name": "batch", "code": 5, "ttl_s": 60, "share": 0.5}]
    extra = {"store": "/kv", "classes": classes, "default_class": "batch"}
    config = json.dumps({"kv_connector": "PrefixStoreConnector", "kv_connector_extra_config": extra})
    for flag in ("--kv-transfer-config", "--kv_transfer_config"):
        found = module._classes(["--max-model-len", "64", flag, config])
        assert found.names() == ["batch"] and found.default == "batch"
    for other in (["--max-model-len", "64"], ["--kv-transfer-config"], ["--kv-transfer-config", "{"]):
        assert module._classes(other).default == "agent"
    for bad in (3, "x", [3], {"classes": [{"name": "a"}]}, {"classes": 3}, {"default_class": "no"}):
        text = json.dumps({"kv_connector_extra_config": bad})
        assert module._classes(["--kv-transfer-config", text]).default == "agent", (
            "the engine says what is wrong"
        )


@pytest.mark.parametrize("command", ["gateway", "gateway-key", "tiny-checkpoint"])
def test_the_help_cuts_no_name_at_80_columns(
    command: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([command, "--help"]) == 0
    text = capfd.readouterr().out
    assert "…" not in text and all(len(line) <= 80 for line in text.splitlines())
    if command == "gateway":
        for name in ("--served-model-name", "--allow-anonymous", "--no-access-log", "--response-ttl-hours"):
            assert name in text


def test_an_engine_that_died_is_one_sentence_and_status_1(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def die(*args: Any) -> None:
        raise EngineDead("its process has ended; the server has to be started again.")

    monkeypatch.setattr(module, "serve", die)
    assert run(["gateway", *MODEL, "--port", "0"]) == 1
    error = capfd.readouterr().err.strip()
    assert error == "vllm-deepinfer gateway: its process has ended; the server has to be started again."


def test_gateway_key(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["gateway-key", "bob"]) == 0
    out, told = capfd.readouterr()
    key = re.search(r"sk-deepinfer-[\w-]+", told)
    assert key is not None and key[0] not in out, "what goes into the key file must not keep the key"
    assert yaml.safe_load(out) == [{"name": "bob", "sha256": digest(key[0])}]
    file = tmp_path / "keys.yaml"
    file.write_text(out)  # the output is a key file
    assert KeyRing.load(file).authenticate(None, key[0]) is not None
    assert run(["gateway-key", "a b"]) == 2


def start(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A gateway in a process of its own, and its URL."""
    command = [PROGRAM, "gateway", *MODEL, "--port", "0", *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://[\d.]+:\d+", line)
    assert found, line + (process.stderr.read() if process.stderr else "")
    return process, found[0]


def ask(url: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5} | more


@pytest.mark.slow
def test_it_serves_and_a_signal_lets_running_answers_end(tmp_path: Path) -> None:
    database = tmp_path / "responses.sqlite"
    process, url = start(
        "--served-model-name", "tiny", "--response-db", str(database), "--engine-args", "--max-model-len 4096"
    )
    try:
        with httpx.Client(base_url=url, timeout=30) as client:
            assert client.get("/ready").status_code == 200
            assert client.post("/v1/chat/completions", json=ask(url)).status_code == 200
            body = ask(url, stream=True, max_tokens=200)
            with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                rest = list(lines)
            assert rest[-2] == "data: [DONE]"
        assert process.wait(30) == 0
        assert database.exists()
        logged = process.stderr.read() if process.stderr else ""
        assert '"status":200' in logged and "Traceback" not in logged
        assert "Stopping: waiting up to 30 s for 1 running requests" in logged
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_what_does_not_end_in_time_ends_with_an_error() -> None:
    process, url = start("--served-model-name", "tiny", "--drain-timeout-s", "0.2")
    try:
        with httpx.Client(base_url=url, timeout=30) as client:
            body = ask(url, stream=True, max_tokens=20_000)
            with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "overloaded_error"
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_port_that_is_taken_is_one_sentence() -> None:
    process, url = start()
    try:
        port = url.rsplit(":", 1)[1]
        command = [PROGRAM, "gateway", *MODEL, "--port", port]
        second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 2
        assert f"port {port} of 127.0.0.1 is taken" in second.stderr and "Traceback" not in second.stderr
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize(
    ("where", "says"),
    [("missing/x.db", "there is no folder"), (".", "is a folder"), ("text.db", "no SQLite file")],
)
def test_a_response_db_that_cannot_be_used(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, where: str, says: str
) -> None:
    (tmp_path / "text.db").write_text("this is no database" * 100)
    assert run(["gateway", *MODEL, "--response-db", str(tmp_path / where)]) == 2
    error = capfd.readouterr().err.strip().splitlines()
    assert len(error) == 1 and says in error[0] and "--response-db" in error[0]
