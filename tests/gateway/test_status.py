"""The numbers behind the status page, on a clock that the test moves."""

from __future__ import annotations

from typing import Any, cast

import pytest

from vllm_deepinfer.engine import Engine, EngineInfo, Health, HealthState, Load
from vllm_deepinfer.gateway.limits.admission import Admission
from vllm_deepinfer.gateway.metrics import GatewayMetrics
from vllm_deepinfer.gateway.status import WINDOW, StatusBoard


class FakeEngine:
    info = EngineInfo(model="/a/folder/of/the/server", max_model_len=10)

    def load(self) -> Load:
        return Load(running_requests=2, kv_tokens_used=30)

    def health(self) -> Health:
        return Health(state=HealthState.WEDGED, detail="stuck")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make() -> tuple[StatusBoard, GatewayMetrics, Admission, Clock]:
    engine, metrics, clock = cast(Engine, FakeEngine()), GatewayMetrics(), Clock()
    admission = Admission(engine.load, max_active=9, max_waiting=9)
    return StatusBoard(engine, metrics, admission, "called", clock), metrics, admission, clock


def test_without_traffic_nothing_is_made_up() -> None:
    board, _, _, _ = make()
    report = board.report()
    minute = report["last_minute"]
    assert minute["hit_rate"] is None and minute["ttft_ms"] == {"p50": None, "p90": None, "p99": None}
    assert report["model"] == "called" and report["health"] == {"state": "wedged", "detail": "stuck"}
    assert report["load"]["running_requests"] == 2 and report["load"]["kv_tokens_used"] == 30


def test_rates_are_over_what_has_been_seen() -> None:
    board, metrics, _, clock = make()
    for _ in range(10):
        clock.now += 1
        metrics.request("/x", 200, 0.1)
        metrics.usage(100, 25, 50)
        metrics.ttft.observe(0.02)
        metrics.itl.observe(0.004)
        board.sample()
    minute = board.report()["last_minute"]
    assert minute["requests"] == 10 and minute["requests_per_s"] == pytest.approx(1.0)
    assert minute["output_tokens_per_s"] == pytest.approx(50.0) and minute["hit_rate"] == 0.25
    assert minute["ttft_ms"]["p50"] == 25.0 and minute["itl_ms"]["p99"] == 5.0


def test_what_is_older_than_a_minute_is_forgotten() -> None:
    board, metrics, admission, clock = make()
    metrics.request("/x", 500, 0.1)
    metrics.ttft.observe(5.0)
    board.sample()
    with admission.admit():
        for _ in range(WINDOW + 1):
            clock.now += 1
            board.sample()
    report: dict[str, Any] = board.report()
    assert report["last_minute"]["failed"] == 0 and report["last_minute"]["ttft_ms"]["p50"] is None
    assert report["totals"]["failed"] == 1
    assert report["history"]["active"] == [1] * (WINDOW + 1)
    assert len(report["history"]["output_tokens"]) == WINDOW


def test_history_counts_per_second() -> None:
    board, metrics, _, clock = make()
    for tokens, status in ((5, 200), (0, 429), (7, 500)):
        clock.now += 1
        metrics.usage(0, 0, tokens)
        metrics.request("/x", status, 0.1)
        board.sample()
    history = board.report()["history"]
    assert history["output_tokens"] == [5, 0, 7] and history["errors"] == [0, 1, 1]
