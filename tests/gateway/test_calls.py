"""Calls: ids, tenants, and the log line at the end."""

from __future__ import annotations

import logging

import pytest

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


def test_the_end_counts_and_logs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("vllm_deepinfer"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm_deepinfer")
    metrics, call = GatewayMetrics(), begin()
    call.status = 200
    call.account.prompt_tokens, call.account.output_tokens = 10, 3
    call.account.first_token = call.account.received + 0.25
    call.end(metrics, background=True)
    (record,) = caplog.records
    assert record.ttft_ms == 250.0 and record.prompt_tokens == 10  # type: ignore[attr-defined]
    assert record.background is True and record.key is None  # type: ignore[attr-defined]
    assert metrics.totals.output_tokens == 3 and metrics.totals.requests == 1


def test_polls_are_neither_logged_nor_totalled(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm_deepinfer"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm_deepinfer")
    metrics = GatewayMetrics()
    begin(route="/health").end(metrics)
    assert caplog.records == [] and metrics.totals.requests == 0
    begin(route="/v1/models").end(metrics)
    assert len(caplog.records) == 1 and metrics.totals.requests == 1
