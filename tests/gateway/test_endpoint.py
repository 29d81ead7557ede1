"""The serving path under clients that leave, do not read or send too much, and engines that fail."""

from __future__ import annotations

import asyncio
import io
import json
import time
from typing import Any

import httpx
import pytest

from tests.gateway.harness import MODEL, Gateway, events, running
from vllm_deepinfer.engine import FinishReason, Overloaded
from vllm_deepinfer.engine.simulated import hashed_tokens
from vllm_deepinfer.gateway import logs
from vllm_deepinfer.gateway.limits.keys import ApiKey, KeyRing, digest

LONG = "word " * 3000
HI = [{"role": "user", "content": "hi"}]
ASK: dict[str, Any] = {"model": MODEL, "messages": HI}
STREAM = ASK | {"stream": True}


def sample(gateway: Gateway, name: str, **labels: str) -> float:
    return gateway.app.core.metrics.registry.get_sample_value(f"deepinfer_gateway_{name}", labels) or 0.0


async def until(condition: Any, seconds: float = 30.0) -> float:
    """Wait for a condition; returns how long it took."""
    started = time.monotonic()
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)
    return time.monotonic() - started


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_client_that_leaves_stops_the_engine(path: str, stream: bool) -> None:
    body = ASK | {"stream": stream}
    body |= {"max_tokens": 4000} if path == "/v1/messages" else {}
    if path == "/v1/responses":
        body = {"model": MODEL, "input": "hi", "stream": stream}
    async with running(LONG) as gateway:
        request = asyncio.create_task(gateway.http.post(path, json=body))
        await until(lambda: gateway.engine.load().running_requests == 1)
        await asyncio.sleep(0.02)
        request.cancel()  # httpx closes the connection
        await until(lambda: gateway.engine.load().active_requests == 0)
        await gateway.idle()
        assert len(gateway.app.core.hub) == 0
        assert sample(gateway, "aborts_total", reason="disconnect") == 1
        assert sample(gateway, "requests_total", route=path, status="499") == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("how", ["a large body after its head", "a second request behind the first"])
async def test_a_client_that_leaves_is_missed_though_nothing_is_read(path: str, how: str) -> None:
    """asyncio does not see the end of a connection whose reading uvicorn has paused."""
    prompt = {"input": "hi"} if path == "/v1/responses" else {"messages": ASK["messages"], "max_tokens": 4000}
    large = how.startswith("a large")
    padding = {"metadata": {"a": "x" * 100_000}} if large else {}
    body = json.dumps({"model": MODEL} | prompt | padding).encode()
    async with running(LONG) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode())
        await asyncio.sleep(0.05)  # so that the gateway waits for the body
        writer.write(body)
        await until(lambda: gateway.engine.load().running_requests == 1)
        if not large:
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            await asyncio.sleep(0.05)
        assert gateway.engine.load().active_requests == 1
        writer.close()
        assert await until(lambda: gateway.engine.load().active_requests == 0) < 0.5
        await gateway.idle()
        assert sample(gateway, "aborts_total", reason="disconnect") == 1


async def test_a_slow_reader_is_dropped_and_holds_up_nobody() -> None:
    async with running(config={"max_model_len": 200_000}, max_pending_bytes=50_000) as gateway:
        gateway.engine._tokens = hashed_tokens(512, reserved=100)
        host, port = gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps(STREAM | {"max_tokens": 100_000}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.read(10)  # and then no more
        await until(lambda: gateway.engine.load().running_requests == 1)
        other = await gateway.http.post("/v1/chat/completions", json=ASK | {"max_tokens": 5})
        assert other.status_code == 200
        await until(lambda: gateway.engine.load().active_requests == 0)
        await gateway.idle()
        assert sample(gateway, "aborts_total", reason="slow_reader") == 1
        writer.close()


async def test_a_silent_stream_is_kept_open() -> None:
    async with running(keepalive_s=0.05) as gateway:
        gateway.engine.faults.stall_s = 0.4
        answer = await gateway.http.post("/v1/chat/completions", json=STREAM)
        assert answer.text.startswith(": keep-alive\n\n")
        assert events(answer.text)[-1] == (None, "[DONE]")
        text = "".join(d["choices"][0]["delta"].get("content") or "" for _, d in events(answer.text)[:-1])
        assert text == "Hello there."


async def test_a_body_over_the_limit() -> None:
    async with running(max_body_bytes=2000) as gateway:
        big = json.dumps(ASK | {"user": "x" * 3000}).encode()
        answer = await gateway.http.post("/v1/chat/completions", content=big)
        assert answer.status_code == 413

        async def chunks() -> Any:  # no content-length: counted as it comes
            for start in range(0, len(big), 500):
                yield big[start : start + 500]

        answer = await gateway.http.post("/v1/chat/completions", content=chunks())
        assert answer.status_code == 413 and "larger than 2000 bytes" in answer.text
        assert (await gateway.http.post("/tokenize", json={"prompt": "x" * 3000})).status_code == 413


async def test_a_body_that_does_not_come() -> None:
    async with running(body_timeout_s=0.1) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        status = await asyncio.wait_for(reader.readline(), 5)
        assert b"408" in status
        writer.close()


async def test_a_large_body_is_converted_off_the_loop() -> None:
    async with running(config={"max_model_len": 600_000, "kv_capacity_tokens": 700_000}) as gateway:
        text = "lorem ipsum dolor sit amet\n" * 12_000
        answer = await gateway.http.post(
            "/v1/chat/completions", json=ASK | {"messages": [{"role": "user", "content": text}]}
        )
        assert answer.status_code == 200, answer.text
        assert text in gateway.prompt()


async def test_too_many_requests_get_429_with_a_time() -> None:
    async with running(LONG, max_active=2) as gateway:
        clients = [asyncio.create_task(gateway.http.post("/v1/chat/completions", json=STREAM)) for _ in "ab"]
        await until(lambda: gateway.app.core.admission.active == 2)
        refused = await gateway.http.post("/v1/chat/completions", json=ASK)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert sample(gateway, "refusals_total", reason="overloaded") == 1
        for client in clients:
            client.cancel()
        await gateway.idle()


async def test_a_full_engine_gets_429_too() -> None:
    async with running() as gateway:
        gateway.engine.faults.refuse = Overloaded("the engine is full.", retry_after_s=7)
        refused = await gateway.http.post("/v1/messages", json=ASK | {"max_tokens": 5})
        assert refused.status_code == 429 and refused.headers["retry-after"] == "7"
        assert refused.json()["error"]["message"] == "the engine is full."


async def test_draining_finishes_what_runs_and_refuses_the_rest() -> None:
    async with running("word " * 200) as gateway:
        stream = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=STREAM))
        await until(lambda: gateway.engine.load().running_requests == 1)
        draining = asyncio.create_task(gateway.app.drain())
        await asyncio.sleep(0)
        refused = await gateway.http.post("/v1/chat/completions", json=ASK)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert (await gateway.http.get("/ready")).status_code == 503
        assert (await gateway.http.get("/health")).status_code == 200
        assert events((await stream).text)[-1] == (None, "[DONE]")
        assert await draining is True


async def test_a_drain_that_takes_too_long_aborts_and_tells_the_client() -> None:
    async with running(LONG, drain_timeout_s=0.05) as gateway:
        stream = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=STREAM))
        await until(lambda: gateway.engine.load().running_requests == 1)
        await asyncio.sleep(0.02)
        assert await gateway.app.drain() is False
        last = events((await stream).text)[-1][1]
        assert last["error"]["type"] == "overloaded_error"


async def test_an_engine_that_dies_ends_every_stream_once() -> None:
    async with running(LONG) as gateway:
        tasks = [
            asyncio.create_task(gateway.http.post("/v1/chat/completions", json=STREAM)) for _ in range(8)
        ]
        await until(lambda: gateway.engine.load().running_requests == 8)
        await asyncio.sleep(0.05)
        gateway.engine.crash()
        for answer in await asyncio.gather(*tasks):
            found = events(answer.text)
            assert "error" in found[-1][1] and sum("error" in data for _, data in found) == 1
        assert (await gateway.http.get("/health")).status_code == 503
        await gateway.idle()


async def test_a_wedged_engine_is_not_healthy() -> None:
    async with running(LONG, config={"wedge_after_s": 0.05}) as gateway:
        stream = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=STREAM))
        await until(lambda: gateway.engine.load().running_requests == 1)
        gateway.engine.hang()
        await asyncio.sleep(0.2)
        health = await gateway.http.get("/health")  # answers while the stream hangs (bug class 34)
        assert health.status_code == 503 and health.json()["status"] == "wedged"
        gateway.engine.resume()
        stream.cancel()


async def test_a_fault_in_the_parser_ends_one_stream_and_stops_the_engine(monkeypatch: Any) -> None:
    from vllm_deepinfer.gateway.streaming.parser import OutputParser

    feed = OutputParser.feed

    def failing(self: OutputParser, delta: Any) -> Any:
        if self.tokens > 5:
            raise RuntimeError("boom")
        return feed(self, delta)

    monkeypatch.setattr(OutputParser, "feed", failing)
    async with running(LONG) as gateway:
        answer = await gateway.http.post("/v1/chat/completions", json=STREAM)
        assert events(answer.text)[-1][1]["error"]["type"] == "api_error"
        assert "boom" not in answer.text
        await gateway.idle()
        assert sample(gateway, "failures_total", reason="internal") == 1


async def test_request_ids_are_the_clients_if_they_are_plain() -> None:
    async with running() as gateway:
        for given, kept in (("abc-1.2:3", True), ("a b", False), ("é" * 3, False), ("x" * 200, False)):
            headers = [(b"x-request-id", given.encode())]
            answer = await gateway.http.post("/v1/chat/completions", json=ASK, headers=headers)
            assert (answer.headers["x-request-id"] == given) is kept
            assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_logs_have_numbers_and_no_text(own_logging: None) -> None:
    text = io.StringIO()
    logs.configure("debug", text)
    secret = "my-secret-question"
    async with running("a-secret-answer") as gateway:
        for path in ("/v1/chat/completions", "/v1/messages"):
            body = {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": secret}]}
            await gateway.http.post(path, json=body)
            await gateway.http.post(path, json=body | {"temperature": secret})
    lines = [json.loads(line) for line in text.getvalue().splitlines()]
    lines = [line for line in lines if line["logger"].endswith("access")]
    assert [line["status"] for line in lines] == [200, 400, 200, 400]
    assert all(line["prompt_tokens"] > 20 and line["finish"] == ["stop"] for line in lines[::2])
    assert all(0 < line["ttft_ms"] <= line["ms"] for line in lines[::2])
    assert "secret" not in text.getvalue()


KEY, OTHER = "sk-deepinfer-one", "sk-deepinfer-two"
RING = KeyRing(
    [
        ApiKey(name="one", sha256=digest(KEY), requests_per_minute=3),
        ApiKey(name="two", sha256=digest(OTHER), tokens_per_minute=100, max_concurrent=1),
    ]
)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/models", "/tokenize"]
)
async def test_a_key_is_needed(path: str) -> None:
    async with running(keys=RING) as gateway:
        method = "GET" if path == "/v1/models" else "POST"
        bad = [{}, {"authorization": "Bearer nope"}, {"x-api-key": "nope"}, {"authorization": f"Basic {KEY}"}]
        for headers in bad:
            answer = await gateway.http.request(method, path, headers=headers, json=ASK)
            assert answer.status_code == 401 and KEY not in answer.text
        for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
            answer = await gateway.http.request(method, path, headers=headers, json=ASK)
            assert answer.status_code != 401
        assert (await gateway.http.get("/health")).status_code == 200


async def test_requests_per_minute() -> None:
    async with running(keys=RING) as gateway:
        headers = {"authorization": f"Bearer {KEY}"}
        statuses = []
        for _ in range(4):
            answer = await gateway.http.post("/v1/chat/completions", json=ASK, headers=headers)
            statuses.append(answer.status_code)
        assert statuses == [200, 200, 200, 429]
        assert 1 <= int(answer.headers["retry-after"]) <= 20
        assert "3 requests per minute" in answer.json()["error"]["message"]


async def test_tokens_per_minute_and_requests_at_once() -> None:
    async with running(LONG, keys=RING) as gateway:
        headers = {"x-api-key": OTHER}
        one = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=STREAM, headers=headers))
        await until(lambda: gateway.engine.load().running_requests == 1)
        two = await gateway.http.post("/v1/chat/completions", json=ASK, headers=headers)
        assert two.status_code == 429 and "1 requests at once" in two.json()["error"]["message"]
        one.cancel()
        await gateway.idle()
        assert gateway.app.core.metrics.totals.output_tokens > 0  # leaving early does not make it free
        three = await gateway.http.post("/v1/chat/completions", json=ASK, headers=headers)
        assert three.status_code == 429 and "100 tokens per minute" in three.json()["error"]["message"]


async def test_tenants_share_neither_cache_entries_nor_responses() -> None:
    async with running(keys=RING) as gateway:
        ids = {}
        for key in (KEY, OTHER):
            body = {"model": MODEL, "input": "hi"}
            answer = await gateway.http.post("/v1/responses", json=body, headers={"x-api-key": key})
            ids[key] = answer.json()["id"]
        salts = [request.cache_salt for request in gateway.script.requests]
        assert None not in salts and salts[0] != salts[1]
        other = await gateway.http.get(f"/v1/responses/{ids[OTHER]}", headers={"x-api-key": KEY})
        assert other.status_code == 404


async def test_a_cancelled_server_aborts_what_it_has() -> None:
    async with running(LONG) as gateway:
        scope: Any = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": [],
            "query_string": b"",
        }
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        inbox.put_nowait({"type": "http.request", "body": json.dumps(STREAM).encode()})

        async def send(message: Any) -> None:
            pass

        task = asyncio.create_task(gateway.app(scope, inbox.get, send))
        await until(lambda: gateway.engine.load().running_requests == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: gateway.engine.load().active_requests == 0)


async def test_finish_reasons_are_logged_as_they_were() -> None:
    assert str(FinishReason.LENGTH) == "length"
    async with running() as gateway:
        answer: httpx.Response = await gateway.http.post("/v1/chat/completions", json=ASK | {"max_tokens": 2})
        assert answer.json()["choices"][0]["finish_reason"] == "length"
