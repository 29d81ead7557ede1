"""Calls: ids, tenants, and the log line at the end."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from vllm_deepinfer.gateway import logs
from vllm_deepinfer.gateway.calls import Call
from vllm_deepinfer.gateway.limits.keys import ApiKey
from vllm_deepinfer.gateway.metrics import GatewayMetrics


def begin(request_id: bytes | None = None, route: str = "/x") -> Call:
    headers = [] if request_id is None else [(b"x-request-id", request_id)]
    return Call.begin({"headers": headers}, route)


@pytest.mark.parametrize("given", [b"a", b"A-1.b:c_d", b"x" * 128])
def test_a_plain_id_is_kept(given: bytes) -> None:
    call = begin(given)
    assert call.request_id == given.decode()
    assert call.headers() == [(b"x-request-id", given), (b"request-id", given)]


@pytest.mark.parametrize("given", [None, b"", b"a b", b"a\nb", b"a\r\nset-cookie: x", b"\xe9", b"x" * 129])
def test_another_one_is_replaced(given: bytes | None) -> None:
    first, second = begin(given), begin(given)
    assert first.request_id.startswith("req_") and first.request_id != second.request_id


def test_the_tenant_is_the_keys_name() -> None:
    call = begin()
    assert call.tenant == ""
    call.key = ApiKey(name="bob", sha256="a" * 64)
    assert call.tenant == "bob"


@pytest.fixture
def lines(own_logging: None) -> Callable[[], list[dict[str, Any]]]:
    """What the access log has written so far."""
    text = io.StringIO()
    logs.configure("info", text)
    return lambda: [json.loads(line) for line in text.getvalue().splitlines()]


def test_the_end_counts_and_logs(lines: Callable[[], list[dict[str, Any]]]) -> None:
    metrics, call = GatewayMetrics(), begin()
    call.status = 200
    call.account.prompt_tokens, call.account.output_tokens, call.account.cached_tokens = 10, 3, 4
    call.account.finish_reasons = ["stop"]
    call.account.first_token = call.account.received + 0.25
    call.end(metrics, background=True)
    (line,) = lines()
    assert line.pop("time").endswith("+00:00") and line.pop("ms") >= 0
    assert line == {
        "level": "info",
        "logger": "vllm_deepinfer.gateway.access",
        "message": "request",
        "request_id": call.request_id,
        "route": call.route,
        "key": None,
        "status": 200,
        "ttft_ms": 250.0,
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 3,
        "finish": ["stop"],
        "background": True,
    }
    assert metrics.totals.output_tokens == 3 and metrics.totals.requests == 1


def test_polls_are_neither_logged_nor_totalled(lines: Callable[[], list[dict[str, Any]]]) -> None:
    metrics = GatewayMetrics()
    begin(route="/health").end(metrics)
    assert lines() == [] and metrics.totals.requests == 0
    begin(route="/v1/models").end(metrics)
    assert len(lines()) == 1 and metrics.totals.requests == 1


def test_without_an_access_log_a_call_is_still_counted(own_logging: None) -> None:
    text = io.StringIO()
    logs.configure("info", text, requests=False)
    metrics = GatewayMetrics()
    begin(route="/v1/models").end(metrics)
    assert text.getvalue() == "" and metrics.totals.requests == 1
