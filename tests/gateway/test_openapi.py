"""schemathesis over the OpenAPI document: whatever it allows or does not, nothing fails and nothing hangs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.gateway.harness import MODEL, Script, ids_of, listening, make_app
from vllm_deepinfer.engine import GenerateRequest

SECONDS = 10
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
GENERATION = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
pytestmark = pytest.mark.slow

quiet = settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.generate],
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def short_answer(request: GenerateRequest) -> list[int]:
    return ids_of("r</think>ok")


@pytest.fixture(scope="module")
def operations() -> Iterator[dict[str, Any]]:
    """The operations of a running gateway, which has a thread of its own."""
    ready, stop = threading.Event(), threading.Event()
    found: dict[str, str] = {}

    async def serve() -> None:
        app, _ = make_app(Script(function=short_answer))
        async with listening(app) as url:
            found["url"] = url
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(30)
    schema = schemathesis.openapi.from_url(f"{found['url']}/openapi.json")
    every: Any = list(schema.get_all_operations())
    yield {f"{each.ok().method.upper()} {each.ok().path}": each.ok() for each in every}
    stop.set()
    thread.join(10)


OPERATIONS = [
    "GET /health", "GET /ready", "GET /metrics", "GET /status.json",
    "GET /v1/models", "GET /v1/models/{model}",
    "POST /tokenize", "POST /detokenize", "POST /v1/messages/count_tokens",
    "GET /v1/responses/{response_id}", "DELETE /v1/responses/{response_id}",
    "POST /v1/responses/{response_id}/cancel", "GET /v1/responses/{response_id}/input_items",
    *(f"POST {path}" for path in GENERATION),
]  # fmt: skip


def test_no_operation_is_left_out(operations: dict[str, Any]) -> None:
    assert sorted(operations) == sorted(OPERATIONS)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_request_makes_the_gateway_fail_or_hang(
    operations: dict[str, Any], name: str, mode: GenerationMode
) -> None:
    statuses = set()

    @quiet
    @given(case=operations[name].as_strategy(generation_mode=mode))
    def attack(case: Any) -> None:
        answer = case.call(timeout=SECONDS)
        case.validate_response(answer, checks=CHECKS)
        assert answer.headers["x-request-id"]
        statuses.add(answer.status_code)

    try:
        attack()
    except Exception as error:
        if type(error).__name__ != "Unsatisfiable":  # without parameters, nothing can be wrong
            raise
    assert not any(status >= 500 for status in statuses)


@pytest.mark.parametrize("path", GENERATION)
def test_nor_one_that_names_the_model(operations: dict[str, Any], path: str) -> None:
    """Past the first check, deeper into conversion."""
    statuses = []

    @quiet
    @given(case=operations[f"POST {path}"].as_strategy(generation_mode=GenerationMode.POSITIVE))
    def attack(case: Any) -> None:
        case.body["model"] = MODEL
        answer = case.call(timeout=SECONDS)
        case.validate_response(answer, checks=CHECKS)
        statuses.append(answer.status_code)

    attack()
    assert len(statuses) >= 20 and set(statuses) <= {200, 400, 404, 409}
