"""One endpoint for all processes: whose series they are, bounded labels, and what does not answer."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllm_deepinfer.cluster.application import decisions
from vllm_deepinfer.cluster.application.decisions import ScalingRecord
from vllm_deepinfer.cluster.application.metrics import (
    COUNTERS,
    GAUGES,
    ApplicationMetrics,
    MetricsServer,
    Numbers,
)
from vllm_deepinfer.recipes.schema import Recipe

RECIPE = Recipe.model_validate(
    {"name": "app", "model": {"tiny": {}}, "pools": {"main": {"role": "aggregated", "replicas": 2}}}
)
GATEWAY = """# TYPE deepinfer_requests_total counter
deepinfer_requests_total{route="chat"} 7.0
# TYPE python_info gauge
python_info{version="3"} 1.0
"""


class Handle:
    """Answers a broadcast as Serve's handle does."""

    def __init__(self, *names: str) -> None:
        self.names, self.broken = names, False

    def broadcast(self, method: str) -> Any:
        assert method == "measures"
        if self.broken:
            raise RuntimeError("the controller is away")
        values = dict.fromkeys((*GAUGES, *COUNTERS), 1.0)
        answers: list[Any] = [{"replica": name, "values": values, "text": ""} for name in self.names]
        return SimpleNamespace(results=lambda timeout_s: [*answers, RuntimeError("died meanwhile")])


@pytest.fixture(autouse=True)
def scrapes(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(url: str, timeout: float) -> Any:
        if ":1/" in url:
            raise httpx.ConnectError("refused")
        return SimpleNamespace(text=GATEWAY)

    monkeypatch.setattr(httpx, "get", get)
    record = ScalingRecord(3, ups=2, downs=1)
    monkeypatch.setattr(decisions, "read", lambda app, pool: record)


def samples(metrics: ApplicationMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in families
        for one in family.samples
    }


def test_numbers_are_the_lowest_free_ones_and_stay_with_their_names() -> None:
    numbers = Numbers()
    assert numbers.of(["b", "a"]) == {"a": 0, "b": 1}
    assert numbers.of(["b", "c"]) == {"b": 1, "c": 0}
    assert numbers.of([]) == {} and numbers.of(["z"]) == {"z": 0}


def test_numbers_never_exceed_how_many_are_there() -> None:
    rng, numbers = random.Random(1), Numbers()
    names = [str(at) for at in range(5)]
    for at in range(300):
        names[rng.randrange(5)] = f"new{at}"
        found = numbers.of(names)
        assert sorted(found.values()) == list(range(5)) and set(found) == set(names)


def test_every_process_s_series_say_whose_they_are() -> None:
    found = samples(ApplicationMetrics(RECIPE, {"main": Handle("x", "y")}, ["http://h:2", "http://h:3"]))
    pool = (("pool", "main"), ("role", "aggregated"))
    assert found["deepinfer_pool_replicas", pool] == 2.0
    assert found["deepinfer_pool_target_replicas", pool] == 3.0
    assert found["deepinfer_pool_scaling_decisions_total", (("direction", "up"), *pool)] == 2.0
    for number in "01":
        own = (*pool[:1], ("replica", number), *pool[1:])
        assert found["deepinfer_replica_active_requests", tuple(sorted(own))] == 1.0
        assert found["deepinfer_replica_steps_total", tuple(sorted(own))] == 1.0
    for gateway in ("h:2", "h:3"):
        assert found["deepinfer_requests_total", (("gateway", gateway), ("route", "chat"))] == 7.0
    assert not [name for name, _ in found if name.startswith("python_")], "another process's own are not ours"
    assert found["deepinfer_scrape_failures_total", ()] == 0.0


def test_who_does_not_answer_is_counted_and_the_others_are_shown() -> None:
    handle = Handle("x")
    metrics = ApplicationMetrics(RECIPE, {"main": handle}, ["http://h:1", "http://h:2"])
    assert samples(metrics)["deepinfer_scrape_failures_total", ()] == 1.0
    handle.broken = True
    found = samples(metrics)
    assert found["deepinfer_scrape_failures_total", ()] == 3.0
    assert found["deepinfer_requests_total", (("gateway", "h:2"), ("route", "chat"))] == 7.0
    assert found["deepinfer_pool_replicas", (("pool", "main"), ("role", "aggregated"))] == 0.0


def test_the_endpoint_is_there_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    import urllib.error
    import urllib.request

    server = MetricsServer(ApplicationMetrics(RECIPE, {"main": Handle("x")}, []), "127.0.0.1", 0)
    with urllib.request.urlopen(server.url, timeout=5) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        assert b"deepinfer_pool_replicas" in answer.read()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(server.url.replace("/metrics", "/"), timeout=5)
    with pytest.raises(OSError, match="in use"):
        MetricsServer(
            ApplicationMetrics(RECIPE, {}, []), "127.0.0.1", int(server.url.split(":")[2].split("/")[0])
        )
    server.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(server.url, timeout=5)


def test_a_record_counts_by_direction() -> None:
    record = ScalingRecord(2).then(4, "busy").then(1, "idle").then(2, "busy")
    assert (record.target, record.ups, record.downs, record.reason) == (2, 2, 1, "busy")
