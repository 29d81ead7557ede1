"""`vllm serve` with the connector: the second process answers from the store that the first one filled."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.plugins import tiny_qwen3

pytestmark = pytest.mark.slow

VLLM = Path(sys.executable).with_name("vllm")
ENGINE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
PROMPT = [20 + (i * i * 31 + i * 17) % 250 for i in range(400)]


def connector(store: Path) -> dict[str, Any]:
    return {
        "kv_connector": "PrefixStoreConnector",
        "kv_connector_module_path": "vllm_deepinfer_plugins.kv_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": str(store), "run_tokens": 128, "admission": "always"},
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before, tiny_qwen3.MAX_MODEL_LEN = tiny_qwen3.MAX_MODEL_LEN, 1_024
    yield tiny_qwen3.write_tiny_qwen3(tmp_path_factory.mktemp("model") / "qwen3")
    tiny_qwen3.MAX_MODEL_LEN = before


@contextmanager
def serving(model: Path, config: dict[str, Any], log: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(VLLM), "serve", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    command += ["--block-size", "32", "--enable-prompt-tokens-details"]
    command += ["--kv-transfer-config", json.dumps(config)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **ENGINE})
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 400
            while not answers(url):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3_000:]
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def complete(url: str, **more: Any) -> tuple[list[int], int]:
    """The answer's tokens, and how many of the prompt's came from a cache."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    asked = {**body, "return_token_ids": True, **more}
    answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=300).raise_for_status().json()
    cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return answer["choices"][0]["token_ids"], cached


def series(url: str) -> dict[str, float]:
    """The store's metrics with the labels that are its own."""
    lines = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if line[:1] != "#"]
    pairs = (line.rpartition(" ") for line in lines if line.startswith("deepinfer_store_"))
    found = {re.sub(r'(engine|model_name)="[^"]*",?', "", name): float(v) for name, _, v in pairs}
    return {name.replace("{}", "").replace(",}", "}"): value for name, value in found.items()}


def until(url: str, name: str) -> float:
    """A metric, once it is there: it travels with the next step's statistics."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if (value := series(url).get(name)) is not None:
            return value
        complete(url, prompt=[5, 6, 7], max_tokens=1)
        time.sleep(0.2)
    raise AssertionError(sorted(series(url)))


def classes(store: Path) -> dict[str, int]:
    """Objects per traffic class, as `store stat` shows them."""
    command = [str(VLLM.with_name("vllm-deepinfer")), "store", "stat", str(store)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(count) for name, count in re.findall(r"(?m)^│ (\w+)\s+│ (\d+)", shown)}


@pytest.mark.long
def test_a_second_process_answers_from_the_store(model: Path, tmp_path: Path) -> None:
    config = connector(tmp_path / "kv")
    with serving(model, config, tmp_path / "one.log") as url:
        chosen = {"prefix_store_class": "chat", "prefix_store_ttl_s": 600}
        first, cached = complete(url, vllm_xargs=chosen)
        assert (len(first), cached) == (6, 0)
        assert until(url, 'deepinfer_store_saves_total{outcome="new"}') == 3
        assert until(url, 'deepinfer_store_puts_total{tier="directory"}') == 3
    assert classes(tmp_path / "kv") == {"chat": 3, "all": 3}
    with serving(model, config, tmp_path / "two.log") as url:
        assert complete(url) == (first, 384)
        assert until(url, "deepinfer_store_loaded_tokens_total") == 384
        assert until(url, 'deepinfer_store_lookups_total{outcome="hit"}') == 1
        assert until(url, 'deepinfer_store_loads_total{outcome="hit"}') == 3
        assert until(url, "deepinfer_store_load_queue") == 0
    assert classes(tmp_path / "kv") == {"agent": 3, "all": 3}, "the longer time of a later request wins"
