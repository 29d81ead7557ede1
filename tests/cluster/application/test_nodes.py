"""Several Ray nodes here: one dies under load; other clusters are left alone; pools grow and shrink."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.cluster.application.applications import processes, running, running_replicas, until, written
from tests.cluster.application.kills import ENGINES, Killer
from tests.cluster.application.traffic import Traffic
from vllm_deepinfer.cluster.application.launch import Application

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]
KILLS = int(os.environ.get("VLLM_DEEPINFER_KILLS", "12"))
SCALING = """
    autoscaling: {target_queue_s: 0.2, upscale_delay_s: 1, downscale_delay_s: 2, interval_s: 0.5,
                  look_back_s: 2, scale_to_zero_after_s: 4}
"""
OTHER = """
import ray, sys
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
print("up", flush=True)
sys.stdin.readline()
print(ray.get(ray.remote(lambda: 42).remote()), flush=True)
"""


@contextmanager
def another_cluster() -> Iterator[subprocess.Popen[str]]:
    """Of somebody else on this machine."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_node_dies_under_load_and_other_clusters_do_not_notice(tmp_path: Path) -> None:
    file = written(tmp_path, replicas=3, ray=ENGINES)
    file.write_text(file.read_text().replace("{cpus: 0.1}", "{cpus: 0.1, custom: {engines: 1}}"))
    with another_cluster() as other:
        with running(file) as application:
            killer = Killer(application, {"main": 3, "gateway": 1})
            with Traffic(list(application.urls), "app", streams=6).flowing() as traffic:
                (tally,) = killer.storm(["node"], max(KILLS // 12, 1), traffic)
            counts = traffic.counts
            assert (counts["lost"], counts["wrong"], counts["cut"]) == (0, 0, 0), traffic.errors
            assert counts["answered"] > 5 and len(tally.recovered) == max(KILLS // 12, 1)
            mine = {one.pid for one in psutil.Process().children(recursive=True)} - {other.pid}
        until(lambda: not [pid for pid in mine if psutil.pid_exists(pid) and _ours(pid)], 20)
        answer, _ = other.communicate("\n", timeout=60)
        assert answer == "42\n"


def _ours(pid: int) -> bool:
    """Whether a process runs and is none of the other cluster's."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and "vdi-" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def test_a_pool_grows_shrinks_goes_to_zero_and_comes_back(tmp_path: Path) -> None:
    file = written(tmp_path, name="scales", more=SCALING, replicas=1)
    text = file.read_text().replace("replicas: 1", "replicas: {min: 0, max: 2, initial: 1}")
    slow = "cost: {per_step: 0.02, per_token: 0.001}, max_num_seqs: 4, max_num_batched_tokens: 64, "
    file.write_text(
        text.replace("wedge_after_s: 2, ", slow).replace("max_num_seqs: 64", "prefix_caching: false")
    )
    said: list[str] = []
    with running(file, say=said.append) as application:
        stop = threading.Event()
        flood = [threading.Thread(target=_flood, args=(application, stop)) for _ in range(12)]
        for one in flood:
            one.start()
        until(lambda: running_replicas(application)["main"] == 2, 90)
        stop.set()
        for one in flood:
            one.join()
        until(lambda: not processes(application, "main"), 90)
        assert _ask(application, 5) == 5, "the request waits for a replica to start"
        application.watch()
        decisions = [line for line in said if line.startswith("pool main scales to")]
        assert decisions, "each change is told"
        metrics = httpx.get(application.metrics_url, timeout=20, trust_env=False).text
        ups = [line for line in metrics.splitlines() if 'direction="up"' in line]
        assert ups and float(ups[0].rsplit(" ", 1)[1]) >= 2


def _ask(application: Application, tokens: int) -> int:
    body = {
        "model": "scales",
        "messages": [{"role": "user", "content": "word " * 300}],
        "max_tokens": tokens,
    }
    url = f"{application.urls[0]}/v1/chat/completions"
    answer = httpx.post(url, json=body, timeout=120, trust_env=False)
    return int(answer.json()["usage"]["completion_tokens"])


def _flood(application: Application, stop: threading.Event) -> None:
    while not stop.is_set():
        assert _ask(application, 8) == 8
