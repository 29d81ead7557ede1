"""How long the prefix store keeps a prompt, as headers, metadata and cache_control say in all three APIs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.harness import ASKS, Gateway, running
from vllm_deepinfer.gateway.errors import ApiError
from vllm_deepinfer.gateway.retention import NOTHING, Wanted, from_body, from_headers, with_cache_control
from vllm_deepinfer.policy.retention import Retention, TrafficClass

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI: Any = [{"role": "user", "content": "hi"}]
CLASS, TTL = "x-prefix-store-class", "x-prefix-store-ttl"


async def asked(gateway: Gateway, path: str, headers: dict[str, str], **more: Any) -> Any:
    """What reached the engine as (class, seconds), or the status and the sentence of a refusal."""
    answer = await gateway.http.post(path, json={**ASKS[path], **more}, headers=headers)
    if answer.status_code != 200:
        return answer.status_code, answer.json()["error"]["message"]
    request = gateway.script.requests[-1]
    return request.traffic_class, request.cache_ttl_s


@pytest.mark.parametrize("path", ASKS)
async def test_class_and_time_reach_the_engine(gateway: Gateway, path: str) -> None:
    assert await asked(gateway, path, {}) == (None, None)
    assert await asked(gateway, path, {CLASS: "chat"}) == ("chat", None)
    assert await asked(gateway, path, {TTL: "90"}) == (None, 90.0)
    both = {"prefix_store_class": "agent", "prefix_store_ttl_s": "3600"}
    assert await asked(gateway, path, {}, metadata=both) == ("agent", 3_600.0)
    assert await asked(gateway, path, {CLASS: "chat"}, metadata=both) == ("chat", 3_600.0)
    assert await asked(gateway, path, {}, metadata={"user_id": "u", "session": "s"}) == (None, None)


@pytest.mark.parametrize("path", ASKS)
async def test_mistakes_get_one_sentence(gateway: Gateway, path: str) -> None:
    before = len(gateway.script.requests)
    unknown = "the traffic class 'agnet' is none of other, agent, chat."
    assert await asked(gateway, path, {CLASS: "agnet"}) == (400, f"{CLASS}: {unknown}")
    for bad in ("0", "-5", "nan", "inf", "soon", ""):
        words = f"{TTL}: send a positive number of seconds, got {bad!r}."
        assert await asked(gateway, path, {TTL: bad}) == (400, words)
    metadata = {"prefix_store_class": "agnet"}
    assert await asked(gateway, path, {}, metadata=metadata) == (
        400,
        f"metadata.prefix_store_class: {unknown}",
    )
    assert len(gateway.script.requests) == before, "no refused request reaches the engine"


async def test_cache_control_of_messages(gateway: Gateway) -> None:
    def text(ttl: str | None) -> dict[str, Any]:
        control = {"type": "ephemeral", **({} if ttl is None else {"ttl": ttl})}
        return {"type": "text", "text": "hi", "cache_control": control}

    def turn(*ttls: str | None) -> Any:
        return [{"role": "user", "content": [text(ttl) for ttl in ttls]}]

    path = "/v1/messages"
    assert await asked(gateway, path, {}, messages=turn(None)) == (None, None)
    assert await asked(gateway, path, {}, messages=turn("5m", None, "1h")) == (None, 3_600.0)
    assert await asked(gateway, path, {}, messages=turn("5m"), system=[text("3d")]) == (None, 259_200.0)
    assert await asked(gateway, path, {}, cache_control={"type": "ephemeral", "ttl": "1h"}) == (None, 3_600.0)
    assert await asked(gateway, path, {TTL: "10", CLASS: "chat"}, messages=turn("1h")) == ("chat", 10.0)
    assert await asked(gateway, path, {}, messages=turn("1h", "soon")) == (
        400,
        "messages.0.content.1.cache_control.ttl: send a time such as 5m, 1h or 3d, got 'soon'.",
    )


def headers(*pairs: tuple[str, str]) -> dict[str, Any]:
    return {"headers": [(name.encode(), value.encode("latin-1")) for name, value in pairs]}


async def test_an_operators_own_classes() -> None:
    own = Retention((TrafficClass("batch", 5, 60, 1.0),), default="batch")
    assert from_headers(headers((CLASS, "batch")), own) == Wanted("batch")
    with pytest.raises(ApiError, match="'chat' is none of batch"):
        from_headers(headers((CLASS, "chat")), own)


async def test_an_operators_own_classes_reach_all_apis() -> None:
    own = Retention((TrafficClass("batch", 5, 60, 1.0),), default="batch")
    async with running(classes=own) as gateway:
        for path in ASKS:
            assert await asked(gateway, path, {CLASS: "batch"}) == ("batch", None)
            metadata = {"prefix_store_class": "batch"}
            assert await asked(gateway, path, {}, metadata=metadata) == ("batch", None)
            unknown = "the traffic class 'chat' is none of batch."
            assert await asked(gateway, path, {CLASS: "chat"}) == (400, f"{CLASS}: {unknown}")
            refused = await asked(gateway, path, {}, metadata={"prefix_store_class": "chat"})
            assert refused == (400, f"metadata.prefix_store_class: {unknown}")


async def test_nothing_costs_nothing() -> None:
    assert from_headers(headers(("x-other", "1")), Retention()) is NOTHING
    assert from_body({"messages": HI}, Retention()) is NOTHING
    assert with_cache_control(NOTHING, {"messages": HI, "system": "s", "tools": None}) is NOTHING


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["cache_control", "ttl", "content", "type", "x"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@given(
    body=st.fixed_dictionaries({}, optional=dict.fromkeys(("metadata", "messages", "system", "tools"), JSON))
)
async def test_whatever_a_body_holds_it_is_read_or_refused(body: dict[str, Any]) -> None:
    try:
        wanted = with_cache_control(from_body(body, Retention()), body)
    except ApiError as error:
        assert error.status == 400 and "\n" not in error.message
    else:
        assert wanted.ttl_s is None or wanted.ttl_s > 0
