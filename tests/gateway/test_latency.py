"""The latency targets of a request reach the engine from all three APIs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.harness import ASKS, Gateway
from vllm_deepinfer.engine import Targets
from vllm_deepinfer.gateway.latency import ITL_HEADER, TTFT_HEADER, targets_from_headers

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def asked(gateway: Gateway, path: str, headers: dict[str, str]) -> Any:
    """The targets that reached the engine, or the status and the sentence of a refusal."""
    answer = await gateway.http.post(path, json=ASKS[path], headers=headers)
    if answer.status_code != 200:
        return answer.status_code, answer.json()["error"]["message"]
    return gateway.script.requests[-1].targets


@pytest.mark.parametrize("path", ASKS)
async def test_targets_reach_the_engine(gateway: Gateway, path: str) -> None:
    assert await asked(gateway, path, {}) is None
    assert await asked(gateway, path, {ITL_HEADER: "25"}) == Targets(itl_ms=25.0)
    assert await asked(gateway, path, {"X-TTFT-Target-Ms": "800.5"}) == Targets(ttft_ms=800.5)
    both = {TTFT_HEADER: "800", ITL_HEADER: "25"}
    assert await asked(gateway, path, both) == Targets(ttft_ms=800.0, itl_ms=25.0)


@pytest.mark.parametrize("path", ASKS)
async def test_what_is_no_time_is_refused(gateway: Gateway, path: str) -> None:
    before = len(gateway.script.requests)
    for name in (ITL_HEADER, TTFT_HEADER):
        for bad in ("0", "-5", "nan", "inf", "fast", "", "25ms"):
            words = f"{name}: send a positive number of milliseconds, got {bad!r}."
            assert await asked(gateway, path, {name: bad}) == (400, words)
    assert len(gateway.script.requests) == before, "no refused request reaches the engine"


async def test_other_headers_ask_for_nothing() -> None:
    assert targets_from_headers({"headers": [(b"x-itl", b"1")]}) is None
