"""OpenAI Chat Completions."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from deepseek_recipe import ChatCompletionChunk, ChatCompletionRequest, ChatCompletionResponse

from vllm_deepinfer.gateway.constraints import ToolPolicy, without_strict
from vllm_deepinfer.gateway.dialects.base import (
    Body,
    ModelCard,
    Prepared,
    check_limit,
    convert,
    render,
    sampling,
)
from vllm_deepinfer.gateway.errors import ApiError, error_body
from vllm_deepinfer.gateway.fields import EngineFields, refuse_unknown
from vllm_deepinfer.gateway.retention import from_body
from vllm_deepinfer.gateway.streaming.parser import Chunk, OutputParser
from vllm_deepinfer.gateway.streaming.sse import data_frame

ENGINE_FIELDS = frozenset(EngineFields.model_fields)
RECIPE_FIELDS = frozenset(
    [
        "messages",
        "model",
        "max_tokens",
        "response_format",
        "stop",
        "stream",
        "stream_options",
        "tools",
        "tool_choice",
        "logprobs",
        "top_logprobs",
        "thinking",
        "reasoning_effort",
    ]
)
OWN_FIELDS = frozenset({"max_completion_tokens", "chat_template_kwargs", "metadata"})
INERT_FIELDS = frozenset(
    [
        "user",
        "store",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
        "modalities",
        "prediction",
    ]
)
GUIDED = "is not a field here; use structured_outputs."
REFUSED = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_grammar", "guided_choice"), GUIDED),
    "functions": "is not supported any more; use tools.",
    "function_call": "is not supported any more; use tool_choice.",
    "audio": "this model writes text only.",
    "web_search_options": "there is no web search here; give the model a tool.",
    "max_output_tokens": "is not a field of this API; use max_completion_tokens.",
    "input": "is not a field of this API; use messages.",
    "instructions": "is not a field of this API; send a message with role system.",
    "system": "is not a field of this API; send a message with role system.",
    "stop_sequences": "is not a field of this API; use stop.",
    "reasoning": "is not a field of this API; use reasoning_effort.",
    "text": "is not a field of this API; use response_format.",
    "output_config": "is not a field of this API; use response_format and reasoning_effort.",
}
FIXED = {  # vllm-router 0.1.17 adds these to every request; they say what happens here anyway
    "no_stop_trim": (False, "stop strings are never part of the answer"),
    "continue_final_message": (False, "set prefix to true in the last assistant message"),
    "skip_special_tokens": (True, "control tokens are never part of the answer"),
    "separate_reasoning": (True, "reasoning is always apart from the answer"),
    "stream_reasoning": (True, "reasoning is streamed like the answer"),
    "include_reasoning": (True, "turn reasoning off with thinking"),
    "return_hidden_states": (False, "there are none to be had"),
}
KNOWN = ENGINE_FIELDS | RECIPE_FIELDS | OWN_FIELDS | INERT_FIELDS | frozenset(FIXED)


# An event whose delta is text alone, and what stands before and after the text.
_TEXT_EVENT = re.compile(
    rb'(data: \{"id":"[^"]*",.*"choices":\[\{"index":\d+,'
    rb'"delta":\{"content":(?:null,"reasoning_content":)?")((?:[^"\\]|\\.)+)'
    rb'("\},"logprobs":null,"finish_reason":null\}\]\}\n\n)',
    re.DOTALL,
)


def prepare(body: Body, card: ModelCard, answer_id: str) -> Prepared:
    """Convert a request. Raises: ApiError."""
    model = card.require(body)
    refuse_unknown(body, KNOWN, REFUSED)
    _check_fixed(body)
    if not isinstance(body.get("stream_options"), dict | None):  # the recipe takes a list of its values too
        raise ApiError(400, "stream_options: send an object.", param="stream_options")
    for name in ("max_completion_tokens", "max_tokens"):
        check_limit(body, name, card)
    fields = EngineFields.read(body, ENGINE_FIELDS)
    plain = {name: value for name, value in body.items() if name in RECIPE_FIELDS}
    _translate(body, plain)
    tools = ToolPolicy.take(body, plain, parallel=fields.parallel_tool_calls is not False)
    conversation = tools.convert(lambda: convert(ChatCompletionRequest, plain, card.options), plain)
    include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    choices = fields.n or 1
    return Prepared(
        answer_id=answer_id,
        model=model,
        conversation=conversation,
        prompt=render(conversation),
        sampling=sampling(conversation, fields, tools, fields.constraint()),
        stream=conversation.stream,
        generator=lambda: ChatCompletionRequest.chunk_generator(conversation, answer_id, model),
        encoder=lambda: ChatEncoder(include_usage),
        collector=lambda: ChatCollector(answer_id, model, choices),
        choices=choices,
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt,
        retention=from_body(body, card.classes),
    )


def _check_fixed(body: Body) -> None:
    for name in FIXED.keys() & body.keys():
        only, why = FIXED[name]
        if body[name] is not None and body[name] is not only:
            raise ApiError(400, f"{name}: only {str(only).lower()} is possible here; {why}.", param=name)


def _translate(body: Body, plain: Body) -> None:
    """Newer spellings → those that the recipe reads."""
    limit = body.get("max_completion_tokens")
    if limit is not None:
        if body.get("max_tokens") not in (None, limit):
            raise ApiError(400, "give max_completion_tokens or max_tokens, not both.", param="max_tokens")
        plain["max_tokens"] = limit
    messages = body.get("messages")
    if isinstance(messages, list):
        plain["messages"] = [
            {**message, "role": "system"}
            if isinstance(message, dict) and message.get("role") == "developer"
            else message
            for message in messages
        ]
    if "response_format" in plain:
        plain["response_format"] = without_strict(plain["response_format"], "json_schema")
    template = body.get("chat_template_kwargs")
    if template is None:
        return
    switch = template.get("thinking", template.get("enable_thinking")) if isinstance(template, dict) else None
    if not isinstance(switch, bool) or len(template) != 1:
        raise ApiError(
            400,
            "chat_template_kwargs: only thinking (true or false) can be set.",
            param="chat_template_kwargs",
        )
    plain.setdefault("thinking", {"type": "enabled" if switch else "disabled"})


class ChatEncoder:
    """Chunks as `data:` events; usage in a chunk of its own, as OpenAI sends it, and only if asked for."""

    def __init__(self, include_usage: bool) -> None:
        self._include_usage = include_usage
        self.forms: dict[int, tuple[bytes, bytes]] = {}
        self._last: dict[str, Any] = {}
        self._usages: list[dict[str, Any]] = []

    def encode(self, index: int, chunks: Sequence[Chunk], parser: OutputParser) -> bytes:
        """See StreamEncoder."""
        texts = [chunk.to_json() for chunk in chunks]
        if parser.finished and texts:
            texts[-1] = self._final(texts[-1], parser)
        if index:
            texts = [
                text.replace('"choices":[{"index":0,', f'"choices":[{{"index":{index},', 1) for text in texts
            ]
        events = [f"data: {text}\n\n".encode() for text in texts]
        if parser.fed and events and not parser.finished:
            form = self.forms.get(index)
            known = form is not None and events[-1] == form[0] + parser.fed + form[1]
            parser.steady = known or self._learn(index, events[-1], parser)
        return b"".join(events)

    def _learn(self, index: int, event: bytes, parser: OutputParser) -> bool:
        """Remember the form of an event if its delta is the text that was fed, all of it and nothing else."""
        found = _TEXT_EVENT.fullmatch(event)
        if found is None or found[2] != parser.fed:
            return False
        self.forms[index] = (found[1], found[3])
        parser.reasoning = found[1].endswith(b'"reasoning_content":"')
        return True

    def _final(self, text: str, parser: OutputParser) -> str:
        document = msgspec.json.decode(text)
        self._usages.append(_counted(document.pop("usage", None) or {}, parser))
        self._last = document
        return _dump(document | {"usage": None}) if self._include_usage else _dump(document)

    def finish(self) -> bytes:
        """See StreamEncoder."""
        usage = b""
        if self._include_usage:
            usage = data_frame(_dump(self._last | {"choices": [], "usage": _sum(self._usages)}))
        return usage + data_frame("[DONE]")

    def document(self) -> Body | None:
        """See StreamEncoder. Chat completions are not stored."""
        return None

    def error(self, error: ApiError) -> bytes:
        """See StreamEncoder. There is no [DONE] after an error: the answer is not complete."""
        return data_frame(_dump(error_body("/v1/chat/completions", error, None)))


class ChatCollector:
    """One `chat.completion` out of the chunks of all choices."""

    def __init__(self, answer_id: str, model: str, choices: int) -> None:
        created = int(time.time())
        self._parts = [ChatCompletionResponse(answer_id, model, created, 0, 0) for _ in range(choices)]
        self._parsers: dict[int, OutputParser] = {}

    def add(self, index: int, chunks: Sequence[Chunk], parser: OutputParser) -> None:
        """See Collector."""
        self._parsers[index] = parser
        for chunk in chunks:
            assert isinstance(chunk, ChatCompletionChunk)
            self._parts[index].accumulate(chunk)

    def result(self) -> Body:
        """See Collector."""
        documents: list[Body] = [json.loads(part.to_json()) for part in self._parts]
        usages = [_counted(document["usage"], self._parsers[i]) for i, document in enumerate(documents)]
        choices = [document["choices"][0] | {"index": i} for i, document in enumerate(documents)]
        return documents[0] | {"choices": choices, "usage": _sum(usages)}


def _counted(usage: Body, parser: OutputParser) -> Body:
    prompt = usage.get("prompt_tokens", 0)
    counted = usage | {"completion_tokens": parser.tokens, "total_tokens": prompt + parser.tokens}
    details = usage.get("completion_tokens_details") or {}
    if details:
        details = details | {"reasoning_tokens": parser.reasoning_tokens(details["reasoning_tokens"])}
    if parser.accepted_drafts:  # how many were rejected no engine tells by request
        details = details | {"accepted_prediction_tokens": parser.accepted_drafts}
    return counted | {"completion_tokens_details": details} if details else counted


def _sum(usages: Sequence[Body]) -> Body:
    """The prompt counts once; what was generated adds up."""
    total = dict(usages[0])
    for usage in usages[1:]:
        total["completion_tokens"] += usage["completion_tokens"]
        total["total_tokens"] += usage["completion_tokens"]
        details = dict(total.get("completion_tokens_details") or {})
        for key, count in (usage.get("completion_tokens_details") or {}).items():
            details[key] = details.get(key, 0) + count
        if details:
            total["completion_tokens_details"] = details
    return total


def _dump(document: Body) -> str:
    return msgspec.json.encode(document).decode()
