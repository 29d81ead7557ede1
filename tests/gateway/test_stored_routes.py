"""Stored responses over HTTP: pages of input items, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.harness import MODEL, Gateway
from vllm_deepinfer.gateway.errors import ApiError
from vllm_deepinfer.gateway.stored_routes import page, shown

ITEMS: list[dict[str, Any]] = [{"id": f"i{n}"} for n in range(5)]


def text_of(item: Any) -> str:
    text: str = item.content[0].text
    return text


def ids(document: dict[str, Any]) -> list[str]:
    return [item["id"] for item in document["data"]]


def test_pages_cover_a_list_once() -> None:
    seen: list[str] = []
    after = None
    for _ in range(3):
        document = page(ITEMS, 2, after)
        seen += ids(document)
        after = document["last_id"]
        assert document["first_id"] == ids(document)[0]
        assert document["has_more"] is (len(seen) < 5)
    assert seen == ["i0", "i1", "i2", "i3", "i4"]
    assert page(ITEMS, 2, "i4") == {"object": "list", "data": [], "has_more": False}


def test_an_exact_fit_has_no_more() -> None:
    assert page(ITEMS, 5, None)["has_more"] is False
    assert page([], 5, None) == {"object": "list", "data": [], "has_more": False}


def test_an_id_that_is_not_in_the_list() -> None:
    with pytest.raises(ApiError, match="there is no item 'x'"):
        page(ITEMS, 2, "x")


def test_items_are_shown_with_parts_and_an_id() -> None:
    user = {"role": "user", "content": "hi"}
    assert shown(user, "i") == {
        "id": "i", "type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}],
    }  # fmt: skip
    assistant = {"type": "message", "role": "assistant", "content": "ok", "id": "own"}
    assert shown(assistant, "i")["content"] == [{"type": "output_text", "text": "ok"}]
    assert shown(assistant, "i")["id"] == "own"
    call = {"type": "function_call_output", "call_id": "c", "output": "x"}
    assert shown(call, "i") == {"id": "i", **call}
    assert user == {"role": "user", "content": "hi"}  # what is stored stays as it was


@pytest.mark.asyncio(loop_scope="module")
async def test_the_clients_pages(gateway: Gateway) -> None:
    items: Any = [{"role": "user", "content": f"part {n}"} for n in range(5)]
    answer = await gateway.openai.responses.create(model=MODEL, input=items)
    newest = await gateway.openai.responses.input_items.list(answer.id, limit=2)
    texts = [text_of(item) async for item in newest]
    assert texts == [f"part {n}" for n in (4, 3, 2, 1, 0)]
    oldest = await gateway.openai.responses.input_items.list(answer.id, order="asc")
    assert text_of(oldest.data[0]) == "part 0"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=nothing"])
async def test_bad_queries(gateway: Gateway, query: str) -> None:
    answer = await gateway.openai.responses.create(model=MODEL, input="hi")
    refused = await gateway.http.get(f"/v1/responses/{answer.id}/input_items?{query}")
    assert refused.status_code == 400 and refused.json()["error"]["message"].endswith(".")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stored_response_is_not_streamed(gateway: Gateway) -> None:
    answer = await gateway.openai.responses.create(model=MODEL, input="hi")
    refused = await gateway.http.get(f"/v1/responses/{answer.id}?stream=true")
    assert refused.status_code == 400 and "leave out stream" in refused.json()["error"]["message"]
    assert (await gateway.http.get(f"/v1/responses/{answer.id}?stream=false")).status_code == 200
