"""A whole application in real Ray: answers, kills under load, metrics, and a stop that leaves nothing."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from ray.serve.handle import DeploymentHandle

from tests.cluster.application.applications import SPLIT, free_ports, processes, running, until, written
from tests.cluster.application.kills import Killer
from tests.cluster.application.traffic import Traffic
from tests.engine.recorder import Recorder, request_of
from vllm_deepinfer.cluster.application.gateway_replica import engine_over, pools_of
from vllm_deepinfer.cluster.application.launch import Application
from vllm_deepinfer.cluster.application.placing import PlacementError
from vllm_deepinfer.cluster.application.specs import GatewaySpec
from vllm_deepinfer.engine.simulated import chained_tokens
from vllm_deepinfer.errors import UserError
from vllm_deepinfer.gateway.engines import vocabulary
from vllm_deepinfer.recipes import load_recipe
from vllm_deepinfer.recipes.checkpoints import ensure_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.slow]
KILLS = int(os.environ.get("VLLM_DEEPINFER_KILLS", "12"))
ROOT = Path(__file__).parents[3]


@dataclass
class Running:
    """An application, the recipe's file that it came from, and the processes that were there before it."""

    application: Application
    file: Path
    before: frozenset[int]

    def ask(self, text: str, tokens: int, **changes: Any) -> httpx.Response:
        body = {
            "model": "app",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            **changes,
        }
        url = self.application.urls[0]
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    file = written(tmp_path_factory.mktemp("app"), SPLIT, replicas=2, gateways=2, port=free_ports(2))
    before = frozenset(_family())
    with running(file) as application:
        yield Running(application, file, before)


def test_streams_and_whole_answers_are_the_same(up: Running) -> None:
    whole = up.ask("hello", 24).json()
    assert whole["usage"]["completion_tokens"] == 24 and whole["choices"][0]["finish_reason"] == "length"
    streamed = up.ask("hello", 24, stream=True).text
    assert streamed.rstrip().endswith("data: [DONE]") and streamed.count('"delta"') >= 10
    assert up.ask("hello", 24).json()["choices"] == whole["choices"], "whichever replica answers"


def test_answers_are_the_simulated_engine_s_own_tokens(up: Running) -> None:
    """As another gateway's process would see them: token by token."""
    recipe = up.application.recipe
    answers = chained_tokens(vocabulary(ensure_checkpoint(recipe))["vocab_size"])
    handles = {name: DeploymentHandle(name, recipe.name) for name in recipe.pools}

    async def talk() -> None:
        pools = pools_of(recipe, handles, GatewaySpec(recipe.model_dump_json(), "test"))
        engine = engine_over(recipe, pools)
        await asyncio.gather(*(pool.start() for pool in pools.values()))
        await engine.start()
        try:
            sink = Recorder()
            requests = [request_of([*range(20, 30 + at)], max_tokens=30) for at in range(24)]
            await asyncio.gather(*(engine.submit(one, sink) for one in requests))
            await sink.ended(*(one.request_id for one in requests))
            for one in requests:
                token_at = answers(one)
                assert sink.tokens[one.request_id] == [token_at(position) for position in range(30)]
        finally:
            await engine.close()
            await asyncio.gather(*(pool.close() for pool in pools.values()))

    asyncio.run(talk())


@pytest.mark.long
def test_kills_under_load_lose_nothing(up: Running) -> None:
    """Prefill and decode replicas and gateways in turn, SIGKILL, and one engine that stands still."""
    killer = Killer(up.application, {"prefill": 2, "decode": 2, "gateway": 2})
    before = dict(processes(up.application, "decode"))
    with Traffic(list(up.application.urls), "app", streams=8).flowing() as traffic:
        tallies = killer.storm(["prefill", "decode", "gateway"], max(KILLS - 1, 3), traffic)
        tallies += killer.storm(["hang:decode"], 1, traffic)
    counts = traffic.counts
    assert (counts["lost"], counts["wrong"], counts["refused"]) == (0, 0, 0), traffic.errors
    assert counts["answered"] > 2 * KILLS
    assert sum(len(one.recovered) for one in tallies) == max(KILLS - 1, 3) + 1
    after = processes(up.application, "decode")
    assert len(after) == 2 and set(after) != set(before)
    up.application.watch()
    assert len(up.application.urls) == 2, "the new gateways have the ports of the old ones"
    assert sorted(up.application.urls) == sorted(traffic.urls)


def test_one_endpoint_shows_every_process_and_its_labels_stay_bounded(up: Running) -> None:
    """After all those kills the replicas of a pool are still numbered 0 and 1."""
    text = httpx.get(up.application.metrics_url, timeout=20, trust_env=False).text
    numbers = {line.split('replica="')[1].split('"')[0] for line in text.splitlines() if 'replica="' in line}
    assert numbers == {"0", "1"}
    for gateway in up.application.urls:
        assert f'gateway="{gateway.removeprefix("http://")}"' in text
    for role in ("prefill", "decode"):
        assert f'deepinfer_pool_replicas{{pool="{role}",role="{role}"}} 2.0' in text
    assert "deepinfer_pool_events_total" in text


def test_a_port_that_is_taken_is_refused_with_its_holder(up: Running) -> None:
    """In a process of its own; this one is connected to a cluster already."""
    done = subprocess.run(
        [Path(sys.executable).with_name("vllm-deepinfer"), "serve", up.file],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    port = up.application.recipe.gateway.port
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.search(rf"gateway.port needs port {port}, which .+ \(\d+\) listens on", done.stderr), (
        done.stderr
    )


def test_a_process_that_is_connected_already_is_left_alone(up: Running, tmp_path: Path) -> None:
    other = Application(load_recipe(written(tmp_path, name="other")))
    with pytest.raises(UserError, match="already connected to a Ray cluster"), other:
        pass
    assert up.ask("still there", 4).status_code == 200


def test_a_stop_lets_running_answers_end_and_leaves_nothing(up: Running) -> None:
    """The last test of the module: the fixture's own stop finds nothing to do."""
    folder = up.application._nodes._folder
    assert folder is not None
    family = set(_family()) - up.before
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(up.ask("a long one", 400)))
    asking.start()
    until(lambda: _decoding(up.application) >= 1, 10)
    assert not answers, "it is still running"
    up.application.stop()
    asking.join(30)
    assert [answer.status_code for answer in answers] == [200]
    assert answers[0].json()["usage"]["completion_tokens"] == 400
    until(lambda: not [pid for pid in family if _runs(pid)], 20)
    assert not folder.exists()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", up.application.recipe.gateway.port), 1)
    up.application.stop()


def test_a_pool_without_a_place_fails_in_time_and_the_next_start_works(tmp_path: Path) -> None:
    """A second start in one process, after the stop above."""
    file = written(tmp_path)
    file.write_text(file.read_text().replace("{cpus: 0.1}", "{cpus: 0.1, custom: {turbine: 1}}"))
    file.write_text(file.read_text().replace("place_s: 30", "place_s: 3"))
    with pytest.raises(PlacementError) as caught, running(file):
        pass
    sentence = str(caught.value)
    assert "pool main could not be placed within 3 s" in sentence
    assert "lacks 1 turbine (free 0)" in sentence and sentence.count(". ") == 0
    with running(written(tmp_path, name="again", replicas=1)) as application:
        body = {"model": "again", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        answer = httpx.post(f"{application.urls[0]}/v1/chat/completions", json=body, timeout=30)
        assert answer.json()["usage"]["completion_tokens"] == 3


def _family() -> list[int]:
    return [one.pid for one in psutil.Process().children(recursive=True)]


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _decoding(application: Application) -> float:
    """Requests in the decode pool."""
    text = httpx.get(application.metrics_url, timeout=20, trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith("deepinfer_replica_active_requests{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if 'pool="decode"' in line)
