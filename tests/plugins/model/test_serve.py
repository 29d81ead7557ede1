"""Stock ``vllm serve``, real processes: the same tokens as the offline engine, refusals in one sentence."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from . import engines

pytestmark = pytest.mark.slow

VLLM = Path(sys.executable).with_name("vllm")
INVARIANT = json.dumps({"deepinfer": {"batch_invariant": True}})
LENGTHS = [1, 2, 17, 64, 129, 500, 1000]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engines.checkpoint("deepseek-v4.1-tiny", tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def server(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server in batch-invariant mode, with small chunks and a warm prefix cache."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(VLLM),
        "serve",
        str(path),
        "--served-model-name",
        "tiny",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2112"]
    command += ["--max-num-batched-tokens", "200", "--additional-config", INVARIANT]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **ENGINE})
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, log)
            yield url
        finally:
            process.terminate()
            process.wait(60)


ENGINE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-4000:])


def _complete(url: str, prompt: list[int]) -> list[int]:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status().json()
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def test_the_server_gives_the_offline_engine_s_tokens(server: str, path: Path) -> None:
    asked = engines.prompts(LENGTHS)
    with engines.engine(path, invariant=True, enable_prefix_caching=False) as llm:
        expected = engines.greedy(llm, asked, 12)
    assert [_complete(server, prompt) for prompt in asked] == expected
    assert [_complete(server, prompt) for prompt in asked] == expected, "with a warm prefix cache"


def test_an_image_is_refused_with_one_sentence(server: str) -> None:
    pixel = (
        "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
        "+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    )
    content = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": pixel}}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    answer = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert "not a multimodal model" in answer.json()["error"]["message"]


def test_a_chat_answers(server: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
    answer = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
    assert answer["usage"]["completion_tokens"] == 5


def _refusal(*arguments: Any) -> str:
    run = subprocess.run(
        [VLLM, "serve", *map(str, arguments), "--enforce-eager"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 2, run.stderr[-2000:]
    assert "Traceback" not in run.stderr
    return run.stderr.strip().splitlines()[-1]


def test_a_wrong_flag_is_one_sentence_and_exit_code_2(path: Path) -> None:
    sentence = _refusal(path, "--tensor-parallel-size", 2)
    assert sentence == (
        "vllm: error: --tensor-parallel-size is 2, but the portable DeepSeek-V4.1 class runs with 1 only: "
        "write that"
    )


def test_a_damaged_checkpoint_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    path = engines.checkpoint("deepseek-v4.1-tiny", tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["kv_source_layer_ids"] = [4]
    (path / "config.json").write_text(json.dumps(config))
    sentence = _refusal(path)
    assert sentence.startswith("vllm: error: text_config.kv_source_layer_ids has no layer at or before 2")
