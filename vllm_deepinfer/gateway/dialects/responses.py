"""OpenAI Responses: conversion and wire format. Storing them is in `gateway/stored.py`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from deepseek_recipe import (
    ConversionError,
    ResponsesRequest,
    ResponsesResponse,
    ResponsesStreamEvent,
)

from vllm_deepinfer.gateway.constraints import ToolPolicy, without_strict
from vllm_deepinfer.gateway.conversion_errors import located
from vllm_deepinfer.gateway.dialects.base import (
    Body,
    ModelCard,
    Prepared,
    check_limit,
    convert,
    encode_body,
    render,
    sampling,
)
from vllm_deepinfer.gateway.errors import ApiError
from vllm_deepinfer.gateway.fields import EngineFields, refuse_unknown
from vllm_deepinfer.gateway.retention import from_body
from vllm_deepinfer.gateway.streaming.parser import Chunk, Generator, OutputParser
from vllm_deepinfer.gateway.streaming.sse import event_frame

ENGINE_FIELDS = frozenset(EngineFields.model_fields) - {"n"}
RECIPE_FIELDS = frozenset(
    [
        "model",
        "input",
        "instructions",
        "max_output_tokens",
        "stream",
        "temperature",
        "top_p",
        "tools",
        "tool_choice",
        "text",
        "reasoning",
        "include",
        "top_logprobs",
        "user",
    ]
)
OWN_FIELDS = frozenset({"previous_response_id", "store", "background", "metadata"})
INERT_FIELDS = frozenset(
    [
        "truncation",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "stream_options",
        "max_tool_calls",
    ]
)
REFUSED = {
    "conversation": "conversations are not kept here; chain turns with previous_response_id.",
    "prompt": "prompt templates are not kept here; send instructions and input.",
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens"), "is not a field of this API; use max_output_tokens."
    ),
    "messages": "is not a field of this API; use input.",
    "system": "is not a field of this API; use instructions.",
    "response_format": "is not a field of this API; use text.format.",
    "reasoning_effort": "is not a field of this API; use reasoning.effort.",
    "thinking": "is not a field of this API; use reasoning.",
    "n": "this API gives one answer; ask several times, or use Chat Completions.",
    "stop": "this API has no stop strings; use Chat Completions.",
    "logprobs": "is not a field of this API; use top_logprobs and include message.output_text.logprobs.",
}
ITEMS = frozenset(
    [
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
    ]
)
"""Types of input items that the recipe reads; it would leave out any other without a word."""
KNOWN = ENGINE_FIELDS | RECIPE_FIELDS | OWN_FIELDS | INERT_FIELDS
ECHOED = (
    "metadata",
    "truncation",
    "prompt_cache_key",
    "safety_identifier",
    "max_tool_calls",
    "previous_response_id",
)
WHOLE_RESPONSE = frozenset(
    f"response.{state}" for state in ("created", "in_progress", "completed", "incomplete", "failed")
)


def check(body: Body) -> None:
    """What can be refused before stored turns are read. Raises: ApiError."""
    refuse_unknown(body, KNOWN, REFUSED)
    for name in ("store", "background"):
        if not isinstance(body.get(name), bool | None):
            raise ApiError(400, f"{name}: send true or false.", param=name)
    if not isinstance(body.get("previous_response_id"), str | None):
        raise ApiError(400, "previous_response_id: send the id of a response.", param="previous_response_id")
    metadata = body.get("metadata")
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise ApiError(400, "metadata: send an object of strings.", param="metadata")
    include = body.get("include")
    if include is not None and not (isinstance(include, list) and all(isinstance(e, str) for e in include)):
        raise ApiError(400, "include: send a list of strings.", param="include")
    if body.get("background") and body.get("stream"):
        raise ApiError(400, "a background response cannot be streamed; leave out stream.", param="stream")
    if body.get("background") and body.get("store") is False:
        raise ApiError(400, "a background response has to be stored; leave out store.", param="store")


def input_items(body: Body) -> list[Any]:
    """This turn's input as a list of items. Raises: ApiError."""
    given = body.get("input")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if isinstance(given, list):
        for number, item in enumerate(given):
            kind = item.get("type", "message") if isinstance(item, dict) else "message"
            if not isinstance(kind, str) or kind not in ITEMS:
                raise ApiError(
                    400,
                    f"input.{number}: there are no items of type {str(kind)[:60]!r} here; send one of "
                    f"{', '.join(sorted(ITEMS))}.",
                    param=f"input.{number}",
                )
        return given
    raise ApiError(400, "input: send a string or a list of items.", param="input")


def prepare(body: Body, earlier: Sequence[Any], card: ModelCard, answer_id: str) -> Prepared:
    """Convert a request whose earlier turns are the items `earlier`. Raises: ApiError."""
    model = card.require(body)
    check_limit(body, "max_output_tokens", card)
    fields = EngineFields.read(body, ENGINE_FIELDS)
    plain = {name: value for name, value in body.items() if name in RECIPE_FIELDS}
    plain["input"] = [*earlier, *input_items(body)]
    options = card.options
    tools = ToolPolicy.take(body, relaxed := dict(plain), parallel=fields.parallel_tool_calls is not False)
    if "text" in relaxed:
        relaxed["text"] = without_strict(relaxed["text"], "format")
    try:
        echo = ResponsesRequest(encode_body(plain)).echo()  # as the client said it
        namespaces = ResponsesRequest(encode_body(relaxed)).namespace_tool_map(options)
    except (ConversionError, ValueError) as error:
        raise located(
            error, plain, lambda part: ResponsesRequest(encode_body(part)).convert(options)
        ) from None
    conversation = tools.convert(lambda: convert(ResponsesRequest, relaxed, options), relaxed)
    settings = _settings(body, fields)

    def generator() -> Generator:
        chunks = ResponsesRequest.chunk_generator(conversation, answer_id, model)
        return chunks.with_namespace_tool_map(namespaces).with_echo(echo)

    return Prepared(
        answer_id=answer_id,
        model=model,
        conversation=conversation,
        prompt=render(conversation),
        sampling=sampling(conversation, fields, tools, fields.constraint()),
        stream=conversation.stream,
        generator=generator,
        encoder=lambda: ResponsesEncoder(answer_id, model, settings),
        collector=lambda: ResponsesCollector(answer_id, model, settings),
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt,
        retention=from_body(body, card.classes),
        detached=settings["background"],
        settings=settings,
    )


def _settings(body: Body, fields: EngineFields) -> Body:
    """Settings that the response reports and the recipe does not echo."""
    settings: Body = {name: body[name] for name in ECHOED if body.get(name) is not None}
    settings["store"] = body.get("store") is not False
    settings["background"] = bool(body.get("background"))
    for name in ("parallel_tool_calls", "frequency_penalty", "presence_penalty"):
        if (value := getattr(fields, name)) is not None:
            settings[name] = value
    return settings


class ResponsesEncoder:
    """Named events; keeps the final response."""

    def __init__(self, answer_id: str, model: str, settings: Body) -> None:
        self._begin = (answer_id, model, int(time.time()))
        self._settings = settings
        self._sent = 0
        self.forms: dict[int, tuple[bytes, bytes]] = {}
        self._response: Body = {}

    def encode(self, index: int, chunks: Sequence[Chunk], parser: OutputParser) -> bytes:
        """See StreamEncoder."""
        frames = []
        for chunk in chunks:
            assert isinstance(chunk, ResponsesStreamEvent)
            name = ResponsesResponse.sse_event_name(chunk) or "message"
            text = chunk.to_json()
            if name in WHOLE_RESPONSE:
                text = self._patch(text, parser)
            frames.append(event_frame(name, text))
        self._sent += len(frames)
        return b"".join(frames)

    def _patch(self, text: str, parser: OutputParser) -> str:
        document = json.loads(text)
        self._response = finished(document["response"], self._settings, parser)
        return _dump(document | {"response": self._response})

    def finish(self) -> bytes:
        """See StreamEncoder. The last event was the response itself."""
        return b""

    def document(self) -> Body | None:
        """See StreamEncoder."""
        return self._response

    def error(self, error: ApiError) -> bytes:
        """See StreamEncoder: an error event, then the failed response."""
        event = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        response = self._response or pending_response(*self._begin, self._settings)  # only kept open so far
        failed = {"type": "response.failed", "response": failed_response(response, error)}
        return event_frame("error", _dump(event | {"sequence_number": self._sent})) + event_frame(
            "response.failed", _dump(failed | {"sequence_number": self._sent + 1})
        )


class ResponsesCollector:
    """One response."""

    def __init__(self, answer_id: str, model: str, settings: Body) -> None:
        self._response = ResponsesResponse(answer_id, model, int(time.time()), 0, 0)
        self._settings = settings
        self._parser: OutputParser | None = None

    def add(self, index: int, chunks: Sequence[Chunk], parser: OutputParser) -> None:
        """See Collector."""
        for chunk in chunks:
            assert isinstance(chunk, ResponsesStreamEvent)
            self._response.accumulate(chunk)
        self._parser = parser

    def result(self) -> Body:
        """See Collector."""
        assert self._parser is not None
        return finished(json.loads(self._response.to_json()), self._settings, self._parser)


def finished(response: Body, settings: Body, parser: OutputParser) -> Body:
    """The response with the gateway's own settings and counts."""
    usage = response.get("usage")
    if usage is not None:
        tokens = parser.tokens
        details = {"cache_write_tokens": 0} | usage["input_tokens_details"]  # newer clients require it
        total = usage["input_tokens"] + tokens
        reasoning = parser.reasoning_tokens(usage["output_tokens_details"]["reasoning_tokens"])
        usage = usage | {
            "input_tokens_details": details,
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": total,
        }
    return response | settings | {"usage": usage}


def pending_response(answer_id: str, model: str, created: int, settings: Body) -> Body:
    """A background response that has not begun."""
    empty: Body = json.loads(ResponsesResponse(answer_id, model, created, 0, 0).to_json())
    return empty | settings | {"status": "queued", "usage": None, "created_at": created}


def failed_response(response: Body, error: ApiError) -> Body:
    """The response after a failure."""
    return response | {
        "status": "failed",
        # The API knows a closed list of codes; of ours only these two are in it.
        "error": {
            "code": "rate_limit_exceeded" if error.status == 429 else "server_error",
            "message": error.message,
        },
    }


def _dump(document: Body) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))
