"""Stock ``vllm serve``: replays are on unasked, `/metrics` tells of them, nonsense is one sentence."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from .oracle import ENGINES, checkpoint
from .test_engine import DOCUMENT, ids

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ENGINES, reason="a server of its own: set DEEPINFER_REPLAY_ENGINES=1"),
]
VLLM = Path(sys.executable).with_name("vllm")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [VLLM, "serve", checkpoint(folder), "--served-model-name", "tiny", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    command += ["--block-size", "16", "--max-num-batched-tokens", "64"]
    log = folder / "log"
    with log.open("wb") as output:
        env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CACHE_ROOT": str(folder / "cache")}
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output, env=env)
        try:
            _wait(process, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


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


def complete(url: str, prompt: list[int], tokens: int = 4) -> list[int]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json={**body, "return_token_ids": True}, timeout=300)
    found: list[int] = answer.raise_for_status().json()["choices"][0]["token_ids"]
    return found


def metrics(url: str) -> dict[str, float]:
    """Our series by name, without prefix and suffix."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    pattern = re.compile(r"deepinfer_replay_(\w+)_total\{[^}]*\} (\S+)")
    return {match[1]: float(match[2]) for line in lines if (match := pattern.match(line))}


def test_every_series_moves(url: str) -> None:
    # Some forty steps of several sizes, after which a step's cost is known.
    for seed in range(14):
        complete(url, ids(5 + 37 * seed % 200, seed=100 + seed))
    complete(url, [*DOCUMENT, 20])
    before = metrics(url)
    complete(url, DOCUMENT[:16] + ids(5, seed=1))  # no longer than the window
    for seed in (2, 3, 4):
        complete(url, DOCUMENT[:64] + ids(20, seed=seed))
    whole = DOCUMENT + complete(url, DOCUMENT, 40)
    complete(url, whole[:144] + ids(9, seed=5))  # the conversation's next turn
    after = metrics(url)
    grown = {name: after[name] - before[name] for name in after}
    assert grown["declined_hits"] >= 1
    assert grown["replayed_tokens"] > 0 and grown["replayed_tokens"] % 16 == 0
    assert grown["kept_windows"] >= 1 and grown["restored_windows"] >= 1
    assert grown["trimmed_rows"] > 0
    assert "saved_seconds" in grown
    print(grown)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ('{"deepinfer": {"encoder_replay": "yes"}}', "\"encoder_replay\"] is 'yes'"),
        ('{"deepinfer": {"window_tier_mib": -1}}', '"window_tier_mib"] is -1'),
        ('{"deepinfer": {"window_tier_ttl_s": 0}}', '"window_tier_ttl_s"] is 0'),
        ('{"deepinfer": {"encoder_repaly": true}}', "did you mean encoder_replay?"),
        (
            '{"deepinfer": {"encoder_replay": false, "decoder_replay": true}}',
            "write encoder_replay true as well",
        ),
        ('{"encoder_replay": true}', 'encoder_replay outside "deepinfer"'),
    ],
)
def test_nonsense_is_one_sentence_and_exit_code_2(tmp_path: Path, setting: str, sentence: str) -> None:
    command = [VLLM, "serve", checkpoint(tmp_path), "--enforce-eager", "--additional-config", setting]
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 2, run.stderr[-2000:]
    assert "Traceback" not in run.stderr
    assert sentence in run.stderr.strip().splitlines()[-1]
