"""Reading bodies and writing JSON without a framework."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from vllm_deepinfer.gateway.errors import ApiError
from vllm_deepinfer.gateway.http_io import Disconnected, header, parse_object, read_body, send_json


def receiver(*messages: dict[str, Any]) -> Any:
    left = list(messages)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.sleep(60)
        return left.pop(0)

    return receive


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def scope(**headers: str) -> dict[str, Any]:
    return {"headers": [(k.replace("_", "-").encode(), v.encode("latin-1")) for k, v in headers.items()]}


async def test_a_body_in_one_and_in_many_parts() -> None:
    assert await read_body(scope(), receiver(part(b"abc")), 10, 1) == b"abc"
    parts = receiver(part(b"a", True), part(b"", True), part(b"bc"))
    assert await read_body(scope(), parts, 3, 1) == b"abc"
    assert await read_body(scope(), receiver({"type": "http.request"}), 3, 1) == b""


@pytest.mark.parametrize("declared", ["4", "99999999999999"])
async def test_a_declared_length_over_the_limit_is_not_read(declared: str) -> None:
    with pytest.raises(ApiError) as caught:
        await read_body(scope(content_length=declared), receiver(), 3, 1)
    assert caught.value.status == 413


async def test_what_comes_is_counted_whatever_was_declared() -> None:
    with pytest.raises(ApiError) as caught:
        await read_body(scope(content_length="nonsense"), receiver(part(b"ab", True), part(b"cd")), 3, 1)
    assert caught.value.status == 413


async def test_a_client_that_leaves() -> None:
    with pytest.raises(Disconnected):
        await read_body(scope(), receiver(part(b"a", True), {"type": "http.disconnect"}), 3, 1)


async def test_a_client_that_is_too_slow() -> None:
    with pytest.raises(ApiError) as caught:
        await read_body(scope(), receiver(part(b"a", True)), 3, 0.01)
    assert caught.value.status == 408


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": NaN}', "not valid JSON"),
        (b'"\\ud800"', "byte 1 has one half of a surrogate pair, which is no character; send the whole pair"),
        (b'{"a": "x\\uDBFF\\n"}', "byte 8 has one half of a surrogate pair"),
        (b'{"a": "\\udc00\\ud800"}', "byte 7 has one half of a surrogate pair"),
        (b'{"a": "\\ud83d\\ude00", "b": "\\udfff"}', "byte 28 has one half of a surrogate pair"),
        (b'{"a": "\\\\ud800", b}', "not valid JSON: (?!byte)"),  # a backslash, and then plain text
        (b'{"a": "\\ud83d\\ude00", b}', "not valid JSON: (?!byte)"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b"[" * 100_000 + b"]" * 100_000, "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
    ],
)
def test_what_is_no_object(body: bytes, says: str) -> None:
    with pytest.raises(ApiError, match=says) as caught:
        parse_object(body)
    assert caught.value.status == 400


def test_an_object() -> None:
    assert parse_object('{"a": [1, null, "é"]}'.encode()) == {"a": [1, None, "é"]}


def test_headers() -> None:
    assert header(scope(x_api_key="k\xe9"), b"x-api-key") == "ké"
    assert header(scope(), b"x-api-key") is None


async def test_json_out() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await send_json(send, 418, {"a": "é"}, [(b"x", b"y")])
    body = '{"a":"é"}'.encode()
    assert sent[0]["status"] == 418 and (b"content-length", str(len(body)).encode()) in sent[0]["headers"]
    assert sent[1] == {"type": "http.response.body", "body": body, "more_body": False}
