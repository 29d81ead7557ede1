"""The little HTTP that the raw ASGI path needs: headers, a bounded body, a JSON answer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from vllm_deepinfer.gateway.errors import ApiError
from vllm_deepinfer.gateway.steps import within
from vllm_deepinfer.gateway.streaming.sse import Message, Receive, Send

Scope = dict[str, Any]
_HALF_PAIR = re.compile(  # a high one without a low one behind it, or a low one without a high one before it
    rb"(?<!\\)(?:\\\\)*(?:(\\u[dD][89abAB]..)(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)(\\u[dD][c-fC-F]..))"
)


class Disconnected(Exception):
    """The client went away before its request was complete."""


def header(scope: Scope, name: bytes) -> str | None:
    """First value of a header; `name` in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None


async def read_body(scope: Scope, receive: Receive, limit: int, timeout_s: float) -> bytes:
    """The whole request body. Raises: ApiError 413 or 408; Disconnected."""
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    try:
        return await within(timeout_s, _read(receive, limit))
    except TimeoutError:
        raise ApiError(408, f"the request body did not arrive within {timeout_s:g} seconds.") from None


async def _read(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {limit} bytes; shorten it.")


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises: ApiError 400."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {_detail(body, error)}.") from None
    if not isinstance(document, dict):
        raise ApiError(400, "the body must be a JSON object.")
    return document


def _detail(body: bytes, error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it nests too deeply"
    if (half := _HALF_PAIR.search(body)) is not None:
        where = half.start(1) if half[1] else half.start(2)
        return f"byte {where} has one half of a surrogate pair, which is no character; send the whole pair"
    return str(error).removeprefix("JSON is malformed: ")


async def send_json(
    send: Send, status: int, document: Any, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """One JSON answer."""
    body = msgspec.json.encode(document)
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body, "more_body": False})
