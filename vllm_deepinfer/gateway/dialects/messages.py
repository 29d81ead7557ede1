"""Anthropic Messages."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from deepseek_recipe import (
    Conversation,
    ConversationRequest,
    MessagesRequest,
    MessagesResponse,
    MessagesStreamEvent,
    RenderedPrompt,
)

from vllm_deepinfer.engine import ConstraintKind, StructuredOutput
from vllm_deepinfer.gateway.constraints import ToolPolicy
from vllm_deepinfer.gateway.dialects.base import (
    Body,
    ModelCard,
    Prepared,
    check_limit,
    convert,
    render,
    render_conversation,
    sampling,
)
from vllm_deepinfer.gateway.errors import ApiError, error_body
from vllm_deepinfer.gateway.fields import EngineFields, refuse_unknown
from vllm_deepinfer.gateway.retention import from_body, with_cache_control
from vllm_deepinfer.gateway.streaming.parser import Chunk, OutputParser
from vllm_deepinfer.gateway.streaming.sse import event_frame

ENGINE_FIELDS = frozenset(EngineFields.model_fields) - {"n", "parallel_tool_calls"}
RECIPE_FIELDS = frozenset(
    [
        "model",
        "messages",
        "system",
        "max_tokens",
        "stop_sequences",
        "stream",
        "temperature",
        "top_p",
        "tools",
        "tool_choice",
        "thinking",
        "output_config",
    ]
)
OWN_FIELDS = frozenset({"output_format", "metadata", "cache_control"})
INERT_FIELDS = frozenset({"betas", "context_management", "inference_geo"})
REFUSED = {
    "mcp_servers": "this server calls no MCP servers; declare their tools as client tools.",
    **dict.fromkeys(
        ("max_output_tokens", "max_completion_tokens"), "is not a field of this API; use max_tokens."
    ),
    "input": "is not a field of this API; use messages.",
    "instructions": "is not a field of this API; use system.",
    "stop": "is not a field of this API; use stop_sequences.",
    "response_format": "is not a field of this API; use output_config.format.",
    "reasoning_effort": "is not a field of this API; use output_config.effort.",
    "reasoning": "is not a field of this API; use thinking.",
    "n": "this API gives one answer; ask several times, or use Chat Completions.",
    **dict.fromkeys(("logprobs", "top_logprobs"), "this API has none; use Chat Completions."),
    "container": "there is no code execution here; declare a client tool.",
}
KNOWN = ENGINE_FIELDS | RECIPE_FIELDS | OWN_FIELDS | INERT_FIELDS


def prepare(body: Body, card: ModelCard, answer_id: str) -> Prepared:
    """Convert a request. Raises: ApiError."""
    model = card.require(body)
    refuse_unknown(body, KNOWN, REFUSED)
    check_limit(body, "max_tokens", card)  # the recipe would put the context's size in its place
    fields = EngineFields.read(body, ENGINE_FIELDS)
    plain = {name: value for name, value in body.items() if name in RECIPE_FIELDS}
    tools = ToolPolicy.take(body, plain, parallel=True)
    conversation = tools.convert(lambda: convert(MessagesRequest, plain, card.options), plain)
    schema = _schema(body)
    prompt = render(conversation) if schema is None else _render_with_schema(conversation, schema)
    constraint = fields.constraint()
    if schema is not None:
        constraint = StructuredOutput(kind=ConstraintKind.JSON_SCHEMA, value=json.dumps(schema))
    return Prepared(
        answer_id=answer_id,
        model=model,
        conversation=conversation,
        prompt=prompt,
        sampling=sampling(conversation, fields, tools, constraint),
        stream=conversation.stream,
        generator=lambda: MessagesRequest.chunk_generator(conversation, answer_id, model),
        encoder=MessagesEncoder,
        collector=lambda: MessagesCollector(answer_id, model),
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt,
        retention=with_cache_control(from_body(body, card.classes), body),
    )


def prepare_count(body: Body, card: ModelCard) -> Prepared:
    """Convert a request to count_tokens, which has no max_tokens. Raises: ApiError."""
    return replace(prepare({"max_tokens": 1} | body | {"stream": False}, card, "count"), stream=False)


def _schema(body: Mapping[str, Any]) -> Any | None:
    """The JSON schema of `output_config.format` or the older `output_format`."""
    config = body.get("output_config")
    wanted = body.get("output_format") or (config.get("format") if isinstance(config, dict) else None)
    if wanted is None:
        return None
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema" or not wanted.get("schema"):
        raise ApiError(
            400,
            'output_config.format: send {"type": "json_schema", "schema": {...}}.',
            param="output_config.format",
        )
    return wanted["schema"]


def _render_with_schema(request: ConversationRequest, schema: Any) -> RenderedPrompt:
    """The recipe reads no format in Messages; render the conversation as if it had."""
    source = request.conversation
    conversation = Conversation(
        source.messages,
        thinking_mode=source.thinking_mode,
        tools=source.tools,
        tool_choice=source.tool_choice,
        reasoning_effort=source.reasoning_effort,
        response_schema=schema,
    )
    return render_conversation(conversation, request.model_version)


class MessagesEncoder:
    """Named events, from message_start to message_stop."""

    def __init__(self) -> None:
        self.forms: dict[int, tuple[bytes, bytes]] = {}

    def encode(self, index: int, chunks: Sequence[Chunk], parser: OutputParser) -> bytes:
        """See StreamEncoder."""
        frames = []
        for chunk in chunks:
            assert isinstance(chunk, MessagesStreamEvent)
            name = MessagesResponse.sse_event_name(chunk) or "message"
            text = chunk.to_json()
            if name == "message_delta":
                document = json.loads(text)
                document["usage"]["output_tokens"] = parser.tokens
                text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
            frames.append(event_frame(name, text))
        return b"".join(frames)

    def finish(self) -> bytes:
        """See StreamEncoder. message_stop has been sent."""
        return b""

    def document(self) -> Body | None:
        """See StreamEncoder. Messages are not stored."""
        return None

    def error(self, error: ApiError) -> bytes:
        """See StreamEncoder."""
        return event_frame("error", json.dumps(error_body("/v1/messages", error, None)))


class MessagesCollector:
    """One message."""

    def __init__(self, answer_id: str, model: str) -> None:
        self._response = MessagesResponse(answer_id, model, int(time.time()), 0, 0)
        self._tokens = 0

    def add(self, index: int, chunks: Sequence[Chunk], parser: OutputParser) -> None:
        """See Collector."""
        for chunk in chunks:
            assert isinstance(chunk, MessagesStreamEvent)
            self._response.accumulate(chunk)
        self._tokens = parser.tokens

    def result(self) -> Body:
        """See Collector."""
        document: Body = json.loads(self._response.to_json())
        document["usage"]["output_tokens"] = self._tokens
        return document
