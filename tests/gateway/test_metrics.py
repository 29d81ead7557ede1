"""Metrics: the cheap histogram against the library's, and what a request adds."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from vllm_deepinfer.engine import Engine, Health, HealthState, Load
from vllm_deepinfer.gateway.metrics import CheapHistogram, GatewayMetrics

BOUNDS = (0.1, 1.0, 10.0)


@given(st.lists(st.floats(0, 100), max_size=50))
def test_it_renders_what_the_librarys_histogram_renders(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    cheap = CheapHistogram("x_seconds", "Doc.", BOUNDS)
    ours.register(cheap)
    slow = Histogram("x_seconds", "Doc.", buckets=BOUNDS, registry=theirs)
    for value in values:
        cheap.observe(value)
        slow.observe(value)
    expected = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    found = generate_latest(ours).decode().splitlines()
    assert [line.rsplit(" ", 1)[0] for line in found] == [line.rsplit(" ", 1)[0] for line in expected]
    for line, other in zip(found, expected, strict=True):
        if not line.startswith("#"):
            assert float(line.rsplit(" ", 1)[1]) == pytest.approx(float(other.rsplit(" ", 1)[1]))


def test_a_value_on_a_bound_belongs_below_it() -> None:
    cheap = CheapHistogram("x", "Doc.", BOUNDS)
    cheap.observe(0.1)
    assert cheap.snapshot() == [1, 0, 0, 0]


@given(st.lists(st.floats(0, 9), min_size=1, max_size=50), st.floats(0.01, 1))
def test_a_quantile_is_the_upper_bound_of_its_bucket(values: list[float], q: float) -> None:
    cheap = CheapHistogram("x", "Doc.", BOUNDS)
    for value in values:
        cheap.observe(value)
    exact = sorted(values)[max(0, -int(-q * len(values) // 1) - 1)]
    found = cheap.quantile(q)
    assert found is not None and found == min(bound for bound in BOUNDS if bound >= exact)


def test_a_quantile_since_a_snapshot() -> None:
    cheap = CheapHistogram("x", "Doc.", BOUNDS)
    assert cheap.quantile(0.5) is None
    for _ in range(100):
        cheap.observe(0.05)
    before = cheap.snapshot()
    assert cheap.quantile(0.5, before) is None
    cheap.observe(5.0)
    assert cheap.quantile(0.5, before) == 10.0 and cheap.quantile(0.5) == 0.1
    cheap.observe(1000.0)
    assert cheap.quantile(1.0) == 10.0  # the last bound is all that is known
    assert cheap.count == 102


def test_requests_and_tokens_are_counted_twice_over() -> None:
    metrics = GatewayMetrics()
    for status in (200, 400, 429, 503, 500):
        metrics.request("/x", status, 0.5)
    metrics.usage(100, 60, 7)
    totals = metrics.totals
    assert (totals.requests, totals.refused, totals.failed) == (5, 2, 1)
    assert (totals.prompt_tokens, totals.cached_tokens, totals.output_tokens) == (100, 60, 7)
    value = metrics.registry.get_sample_value
    assert value("deepinfer_gateway_requests_total", {"route": "/x", "status": "429"}) == 1
    assert value("deepinfer_gateway_tokens_total", {"kind": "cached"}) == 60
    assert value("deepinfer_gateway_duration_seconds_count", {"route": "/x"}) == 5


def test_gauges_follow_the_engine() -> None:
    metrics = GatewayMetrics()
    loads = [Load(running_requests=3, kv_tokens_free=9)]

    class Watched:
        failures = 0

        def load(self) -> Load:
            return loads[-1]

        def health(self) -> Health:
            return Health(state=HealthState.READY, sink_failures=self.failures)

    engine = Watched()
    metrics.watch(lambda: 5, cast(Engine, engine))
    assert b"deepinfer_gateway_active_requests 5.0" in metrics.render()
    assert b"deepinfer_engine_running_requests 3.0" in metrics.render()
    loads.append(Load(running_requests=4))
    assert b"deepinfer_engine_running_requests 4.0" in metrics.render()
    assert b"deepinfer_engine_kv_tokens_free 0.0" in metrics.render()
    assert b"deepinfer_engine_sink_failures 0.0" in metrics.render()
    engine.failures = 2
    assert b"deepinfer_engine_sink_failures 2.0" in metrics.render()


def test_gateways_do_not_share_metrics() -> None:
    first, second = GatewayMetrics(), GatewayMetrics()
    first.request("/x", 200, 1)
    assert (
        second.registry.get_sample_value("deepinfer_gateway_requests_total", {"route": "/x", "status": "200"})
        is None
    )
