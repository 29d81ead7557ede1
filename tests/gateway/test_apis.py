"""What is kept of an answer, and what happens when it cannot be kept."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest

from tests.gateway.harness import MODEL, events, running
from vllm_deepinfer.gateway.apis import new_id


def test_ids_cannot_be_guessed() -> None:
    ids = {new_id("resp_") for _ in range(1000)}
    assert len(ids) == 1000 and all(len(each) == len("resp_") + 32 for each in ids)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_full_disk_loses_the_turn_and_not_the_answer(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as gateway:

        async def put(response: Any) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(gateway.app.core.responses, "put", put)
        body = {"model": MODEL, "input": "hi", "stream": stream}
        answer = await gateway.http.post("/v1/responses", json=body)
        assert answer.status_code == 200
        document = events(answer.text)[-1][1]["response"] if stream else answer.json()
        assert document["status"] == "completed" and document["usage"]["output_tokens"] == 11
        value = gateway.app.core.metrics.registry.get_sample_value
        assert value("deepinfer_gateway_failures_total", {"reason": "response_store"}) == 1


async def test_an_answer_that_failed_is_not_stored() -> None:
    async with running() as gateway:
        gateway.engine.faults.fail_requests |= {1: 3, 2: 3}
        for stream in (True, False):
            body = {"model": MODEL, "input": "hi", "stream": stream}
            answer = await gateway.http.post("/v1/responses", json=body)
            assert answer.status_code == (200 if stream else 500)
            if stream:
                failed = events(answer.text)[-1][1]["response"]["id"]
        assert (await gateway.http.get(f"/v1/responses/{failed}")).status_code == 404
