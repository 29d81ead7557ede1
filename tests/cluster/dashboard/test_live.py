"""Every metric and label of the dashboard at the endpoint of a running application; real Prometheus if "
"there is one."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.application.applications import free_ports, running, until
from tests.cluster.dashboard.queries_of import grouped, plain, queries, selectors
from tests.cluster.dashboard.series import series_of

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).parents[3]
QUERIES = queries(engines=False)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The metrics of a whole application that has answered something."""
    file = tmp_path_factory.mktemp("dashboard") / "laptop-simulated.yaml"
    recipe = (ROOT / "recipes" / "laptop-simulated.yaml").read_text()
    file.write_text(recipe.replace("port: 8000", "port: 0"))
    with running(file) as application:
        body = {"model": "simulated", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
        for change in ({}, {"stream": True}, {"model": "unknown"}):
            httpx.post(f"{application.urls[0]}/v1/chat/completions", json=body | change, timeout=60)
        until(lambda: "deepinfer_pool_target_replicas" in httpx.get(application.metrics_url).text, every_s=1)
        yield application.metrics_url


def read(url: str) -> dict[str, list[set[str]]]:
    """The endpoint's series."""
    return series_of(httpx.get(url, timeout=30).text)


def test_every_metric_and_label_of_the_dashboard_is_at_the_endpoint(endpoint: str) -> None:
    series = read(endpoint)
    for query in QUERIES:
        for name, matched in selectors(query):
            assert name in series, f"{name} of {query.expression}"
            for labels in series[name]:
                assert matched <= labels, f"{name} has {labels}, and the query matches {matched}"
                assert grouped(query) <= labels, (
                    f"{name} has {labels}, and the query sums by {grouped(query)}"
                )


def test_the_important_ones_have_series(endpoint: str) -> None:
    series = read(endpoint)
    for name, count in (
        ("deepinfer_gateway_tokens_total", 4),
        ("deepinfer_replica_active_requests", 4),
        ("deepinfer_pool_replicas", 2),
        ("deepinfer_hand_over_events_total", 8),
    ):
        assert len(series[name]) >= count, name


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus on PATH")
def test_prometheus_scrapes_it_and_answers_every_query(endpoint: str, tmp_path: Path) -> None:
    target = endpoint.removeprefix("http://").removesuffix("/metrics")
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
        f"scrape_configs: [{{job_name: app, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    address = f"127.0.0.1:{free_ports(1)}"
    options = [
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address={address}",
    ]
    with subprocess.Popen(["prometheus", *options, "--log.level=error"]) as server:
        try:
            until(lambda: bool(answers(address, "count(deepinfer_pool_replicas)")), timeout_s=30, every_s=0.5)
            time.sleep(4)  # rates need a few scrapes
            silent = [query.expression for query in QUERIES if not answers(address, plain(query))]
        finally:
            server.terminate()
    # Nothing was refused or ended early, no pool lost anything, and no request is active now.
    quiet = ("refusals", "failures", "aborts", "_events", "scaling_decisions", "cached", "avg by (pool)")
    assert [one for one in silent if not any(word in one for word in quiet)] == []


def answers(address: str, expression: str) -> list[Any]:
    """Series of an instant query. Raises: AssertionError where Prometheus refuses it."""
    try:
        answer = httpx.get(f"http://{address}/api/v1/query", params={"query": expression}, timeout=10)
    except httpx.TransportError:
        return []
    if answer.status_code == 503:  # not ready
        return []
    body = answer.json()
    assert body["status"] == "success", f"{expression}: {body}"
    result: list[Any] = body["data"]["result"]
    return result
