"""Every metric and label of the dashboard at the application's endpoint, without starting one: see "
"test_live.py."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.cluster.dashboard.queries_of import grouped, queries, selectors
from tests.cluster.dashboard.series import series_of
from tests.recipes.samples import SIMULATED, recipe
from vllm_deepinfer.cluster.application import metrics as endpoint
from vllm_deepinfer.cluster.application.pool_counts import PoolCounts
from vllm_deepinfer.engine.simulated import SimulatedEngine
from vllm_deepinfer.gateway.metrics import GatewayMetrics

POOLS = ("prefill", "decode")


def gateway_text() -> str:
    """What a gateway in front of two pools shows."""
    found = GatewayMetrics()
    found.watch(lambda: 3, SimulatedEngine())
    found.request("/v1/chat/completions", 200, 0.5)
    found.usage(10, 4, 2)
    view = SimpleNamespace(counts=Counter(stale=1), members={"a": 1})
    pools: Any = {name: SimpleNamespace(counts=Counter(rerouted=2), view=view) for name in POOLS}
    found.registry.register(PoolCounts(pools, Counter(handed_over=5)))
    return found.render().decode()


class Handle:
    """Serve's handle to a pool of two replicas."""

    def broadcast(self, method: str) -> Any:
        assert method == "measures"
        values = dict.fromkeys((*endpoint.GAUGES, *endpoint.COUNTERS), 1)
        answers = [{"replica": name, "values": values, "text": ""} for name in ("x", "y")]
        return SimpleNamespace(results=lambda timeout_s: answers)


@pytest.fixture
def series(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[set[str]]]:
    record = SimpleNamespace(target=2, ups=1, downs=0)
    monkeypatch.setattr("vllm_deepinfer.cluster.application.decisions.read", lambda application, pool: record)
    text = gateway_text()
    monkeypatch.setattr(httpx, "get", lambda url, timeout: SimpleNamespace(text=text))
    handles = {name: Handle() for name in POOLS}
    rendered = endpoint.ApplicationMetrics(recipe(SIMULATED), handles, ["http://127.0.0.1:8000"]).render()
    return series_of(rendered.decode())


@pytest.mark.parametrize("query", queries(engines=False), ids=lambda query: query.legend)
def test_the_endpoint_has_what_a_query_names(query: Any, series: dict[str, list[set[str]]]) -> None:
    for name, matched in selectors(query):
        assert name in series
        for labels in series[name]:
            assert matched | grouped(query) <= labels, f"{name} has {labels}"


def test_most_of_them_have_series(series: dict[str, list[set[str]]]) -> None:
    names = {name for query in queries(engines=False) for name, _ in selectors(query)}
    empty = {name for name in names if not series[name]}
    assert empty == {f"deepinfer_gateway_{kind}_total" for kind in ("aborts", "failures", "refusals")}
