"""Everything but generation, over a socket: models, tokens, health, metrics, pages and wrong turns."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.harness import MODEL, Gateway, ids_of, running
from vllm_deepinfer.gateway.limits.keys import KeyRing, new_key

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI: Any = [{"role": "user", "content": "hi"}]


async def test_models_in_both_shapes(gateway: Gateway) -> None:
    listed = await gateway.openai.models.list()
    assert [model.id for model in listed.data] == [MODEL, "alias"]
    document = (await gateway.http.get("/v1/models")).json()
    assert (document["first_id"], document["last_id"], document["has_more"]) == (MODEL, "alias", False)
    assert document["data"][0]["max_model_len"] == 8192
    assert (await gateway.openai.models.retrieve("alias")).id == "alias"
    missing = await gateway.http.get("/v1/models/other/model")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


async def test_an_alias_is_answered_under_its_own_name(gateway: Gateway) -> None:
    answer = await gateway.openai.chat.completions.create(model="alias", messages=HI)
    assert answer.model == "alias"


async def test_tokenize_text(gateway: Gateway) -> None:
    answer = await gateway.http.post("/tokenize", json={"prompt": "hi 😀", "return_token_strs": True})
    document = answer.json()
    assert document["tokens"] == ids_of("hi 😀") and document["count"] == len(document["tokens"])
    assert document["max_model_len"] == 8192 and len(document["token_strs"]) == document["count"]


async def test_text_never_becomes_a_control_token(gateway: Gateway) -> None:
    for text in ("<think>", "<｜User｜>", "｜DSML｜", "<｜end▁of▁sentence｜>"):
        answer = await gateway.http.post("/tokenize", json={"prompt": text})
        assert min(answer.json()["tokens"]) > 10
        back = await gateway.http.post("/detokenize", json={"tokens": answer.json()["tokens"]})
        assert back.json() == {"prompt": text}


async def test_the_first_token_of_a_prompt_on_request(gateway: Gateway) -> None:
    answer = await gateway.http.post("/tokenize", json={"prompt": "hi", "add_special_tokens": True})
    assert answer.json()["tokens"] == [0, *ids_of("hi")]


async def test_tokenize_a_chat_is_what_the_engine_gets(gateway: Gateway) -> None:
    answer = await gateway.http.post("/tokenize", json={"messages": HI, "reasoning_effort": "max"})
    await gateway.openai.chat.completions.create(model=MODEL, messages=HI, reasoning_effort="max")  # type: ignore[arg-type]
    assert answer.json()["tokens"] == list(gateway.script.requests[0].prompt_token_ids)


async def test_detokenize(gateway: Gateway) -> None:
    answer = await gateway.http.post("/detokenize", json={"tokens": [3, *ids_of("hi"), 4]})
    assert answer.json() == {"prompt": "<｜User｜>hi<｜Assistant｜>"}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/tokenize", {}, "prompt: send text"),
        ("/tokenize", {"prompt": 5}, "prompt: send text"),
        ("/tokenize", {"prompt": "x", "model": "y"}, "does not exist here"),
        ("/tokenize", {"messages": "x"}, "messages: send a list"),
        ("/detokenize", {}, "tokens: send a list of token ids"),
        ("/detokenize", {"tokens": [-1]}, "tokens: send a list of token ids"),
        ("/detokenize", {"tokens": [True]}, "tokens: send a list of token ids"),
        ("/detokenize", {"tokens": [2**31]}, "2147483648"),
        (
            "/v1/messages/count_tokens",
            {"model": MODEL},
            'messages is missing: send a list such as [{"role": "user", "content": "Hello"}].',
        ),
    ],
)
async def test_mistakes(gateway: Gateway, path: str, body: Any, says: str) -> None:
    answer = await gateway.http.post(path, json=body)
    assert answer.status_code in (400, 404) and says in answer.json()["error"]["message"], answer.text


async def test_a_fault_of_ours_is_said_in_the_apis_own_form(gateway: Gateway, monkeypatch: Any) -> None:
    monkeypatch.setattr(gateway.app.core.runner.prompts, "decode", lambda ids: 1 / 0)
    answer = await gateway.http.post("/detokenize", json={"tokens": [1]})
    assert answer.status_code == 500 and "ZeroDivision" not in answer.text
    assert answer.json()["error"]["type"] == "api_error"
    assert answer.headers["x-request-id"]


async def test_health_and_readiness(gateway: Gateway) -> None:
    health = await gateway.http.get("/health")
    assert health.status_code == 200 and health.json() == {"status": "ready", "detail": ""}
    ready = await gateway.http.get("/ready")
    assert ready.status_code == 200 and ready.json()["ready"] is True


async def test_metrics() -> None:
    async with running("r</think>one two three") as gateway:
        for _ in range(2):
            await gateway.openai.chat.completions.create(model=MODEL, messages=HI)
        await gateway.http.post("/v1/chat/completions", json={})
        answer = await gateway.http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = answer.text.splitlines()
        route = 'route="/v1/chat/completions"'
        assert f'deepinfer_gateway_requests_total{{{route},status="200"}} 2.0' in lines
        assert f'deepinfer_gateway_requests_total{{{route},status="400"}} 1.0' in lines
        assert "deepinfer_gateway_ttft_seconds_count 2.0" in lines
        tokens = 2 * (len(ids_of("r</think>one two three")) + 1)
        assert f'deepinfer_gateway_tokens_total{{kind="output"}} {float(tokens)}' in lines
        assert 'deepinfer_gateway_tokens_total{kind="cached"} 32.0' in lines
        assert "deepinfer_engine_running_requests 0.0" in lines


async def test_paths_and_methods_that_are_not_there(gateway: Gateway) -> None:
    missing = await gateway.http.get("/v1/nothing")
    assert missing.status_code == 404 and "/docs" in missing.json()["error"]["message"]
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
        wrong = await gateway.http.get(path)
        assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
    wrong = await gateway.http.delete("/v1/models")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "GET"
    anthropic = await gateway.http.get("/v1/messages/count_tokens")
    assert anthropic.status_code == 405 and anthropic.json()["type"] == "error"


async def test_every_answer_has_one_request_id(gateway: Gateway) -> None:
    for path in ("/health", "/v1/models", "/nothing", "/v1/messages"):
        answer = await gateway.http.get(path, headers={"x-request-id": "mine"})
        assert answer.headers.get_list("x-request-id") == ["mine"]


async def test_pages_load_nothing_from_elsewhere(gateway: Gateway) -> None:
    for path in ("/status", "/docs"):
        page = await gateway.http.get(path)
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "http://" not in page.text and "https://" not in page.text and " src=" not in page.text
    home = await gateway.http.get("/")
    assert home.status_code in (302, 307) and home.headers["location"] == "/status"


async def test_what_needs_no_key_shows_no_request() -> None:
    key, entry = new_key("bob")
    async with running("a-secret-answer", keys=KeyRing([entry]), key=key) as gateway:
        secret: Any = [{"role": "user", "content": "my-secret-question"}]
        await gateway.openai.chat.completions.create(model=MODEL, messages=secret)
        for path in ("/status.json", "/metrics", "/health", "/ready", "/openapi.json", "/docs", "/status"):
            page = await gateway.http.get(path)
            assert page.status_code == 200
            assert "secret" not in page.text and "bob" not in page.text
        assert (await gateway.http.get("/v1/models")).status_code == 401
        assert (await gateway.http.get("/nothing")).status_code == 401


async def test_the_openapi_document_names_every_path(gateway: Gateway) -> None:
    document = (await gateway.http.get("/openapi.json")).json()
    assert set(document["paths"]) == {
        "/health", "/ready", "/metrics", "/status.json", "/tokenize", "/detokenize", "/v1/models",
        "/v1/models/{model}", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens",
        "/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel",
        "/v1/responses/{response_id}/input_items",
    }  # fmt: skip
    chat = document["components"]["schemas"]["ChatCompletionRequest"]
    assert chat["required"] == ["model", "messages"]
    assert {"temperature", "n", "logit_bias", "structured_outputs", "stop"} <= chat["properties"].keys()
