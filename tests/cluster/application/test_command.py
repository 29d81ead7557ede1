"""`vllm-deepinfer serve RECIPE` as a user runs it: faults are told before anything starts; Ctrl-C ends it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.cluster.application.applications import free_ports, until, written
from vllm_deepinfer.cluster.application.command import on_port, ready
from vllm_deepinfer.recipes import load_recipe

ROOT = Path(__file__).parents[3]
TOOL = Path(sys.executable).with_name("vllm-deepinfer")


def ran(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TOOL, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_another_port_is_the_first_gateway_s(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, port=8000))
    assert on_port(recipe, 9000).gateway.port == 9000 and on_port(recipe, None) == recipe
    assert on_port(recipe, 9000).pools == recipe.pools


def test_what_a_user_can_do_is_shown(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path))
    text = ready(["http://h:1", "http://h:2"], "http://h:3/metrics", recipe)
    assert "Ready: http://h:1, http://h:2" in text and "http://h:3/metrics" in text
    assert "curl -N http://h:1/v1/chat/completions" in text and '"model": "app"' in text


@pytest.mark.slow
def test_a_bad_recipe_is_told_as_check_tells_it_and_nothing_starts(tmp_path: Path) -> None:
    file = written(tmp_path)
    bad = (
        file.read_text().replace("max_num_seqs: 64", "max_num_seq: 64").replace("replicas: 2", "replicas: -2")
    )
    file.write_text(bad)
    checked, served = ran("check", file), ran("serve", file)
    assert checked.returncode == served.returncode == 2
    said = served.stdout + served.stderr
    assert "max_num_seqs" in said and "replicas" in said and "Traceback" not in said
    assert "starting Ray" not in said
    assert _sentences(said) == _sentences(checked.stdout + checked.stderr)


def _sentences(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if re.search(r"line \d+|pools\.", line)]


@pytest.mark.slow
@pytest.mark.ray
def test_ctrl_c_ends_it_in_good_order(tmp_path: Path) -> None:
    port = free_ports(1)
    file = written(tmp_path, replicas=1)
    process = subprocess.Popen(
        [TOOL, "serve", file, "--port", str(port)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        seen = []
        for line in process.stdout:
            seen.append(line)
            if line.startswith("Ready: "):
                break
        assert seen and seen[-1] == f"Ready: http://127.0.0.1:{port}\n", seen
        body = {"model": "app", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        assert httpx.post(url, json=body, timeout=30, trust_env=False).status_code == 200
        family = [one.pid for one in psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait(60) == 0 and "Traceback" not in rest and "stopping" in rest
        until(lambda: not [pid for pid in family if psutil.pid_exists(pid)], 20)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
