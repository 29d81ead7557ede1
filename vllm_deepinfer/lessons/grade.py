"""Exact checks of answers, read as the gateway reads them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from deepseek_recipe import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    InferenceChunk,
    InferenceFinishReason,
    PromptUsage,
    StreamProcessor,
)

from .lesson import Lesson, Message
from .rendering import convert


@dataclass(frozen=True)
class Grade:
    """Attributes:
    well_formed: it can be read as what was asked for: a call of an offered tool with all its parameters in
        their types, a JSON object, a number; for the other kinds, any text.
    exact: it is the right answer.
    """

    well_formed: bool
    exact: bool


def grade(lesson: Lesson, turn: int, output: str, *, ended: bool = True) -> Grade:
    """Grade what the model wrote for message ``turn``.

    Args:
        output: Text with its control tokens, without the end of sentence.
        ended: Whether the model ended it; what was cut off is wrong.
    """
    right = lesson.messages[turn]
    try:
        found = read(lesson, turn, output)
    except (RuntimeError, ValueError):  # the parser gives up on it
        return Grade(False, False)
    if right.get("tool_calls"):
        return _calls(lesson, right, found, ended)
    text, expected = found.get("content") or "", right["content"]
    spoken = bool(text.strip()) and not found.get("tool_calls")
    if lesson.kind == "json":
        value, wanted = _json(text), json.loads(expected)
        return Grade(isinstance(value, dict), ended and spoken and _same(value, wanted))
    if lesson.kind in ("arithmetic", "reasoning"):
        result = _result(text)
        return Grade(result is not None, ended and spoken and result == _result(expected))
    return Grade(spoken, ended and spoken and text.strip() == expected)


def read(lesson: Lesson, turn: int, output: str) -> dict[str, Any]:
    """The assistant's message that a client of Chat Completions would get.

    Raises:
        RuntimeError: The recipe's parser cannot read it.
    """
    request = convert(lesson, turn)
    generator = ChatCompletionRequest.chunk_generator(request, "id", "lessons")
    processor = StreamProcessor(generator, request.parsing_options)
    response = ChatCompletionResponse("id", "lessons", 0, 0, 0)
    usage = PromptUsage(prompt_tokens=1, prompt_cache_hit_tokens=0)
    for chunk in (
        InferenceChunk.ready(prompt_usage=usage),
        InferenceChunk.text(output, 1),
        InferenceChunk.finish(InferenceFinishReason.Stop),
    ):
        for event in processor.push(chunk):
            assert isinstance(event, ChatCompletionChunk)
            response.accumulate(event)
    message: dict[str, Any] = json.loads(response.to_json())["choices"][0]["message"]
    return message


def _calls(lesson: Lesson, right: Message, found: dict[str, Any], ended: bool) -> Grade:
    calls = [call["function"] for call in found.get("tool_calls") or ()]
    wanted = right["tool_calls"][0]["function"]
    formed = bool(calls) and ended and all(_is_call(lesson, call) for call in calls)
    if not formed or len(calls) != 1:
        return Grade(formed, False)
    same = _same(json.loads(calls[0]["arguments"]), json.loads(wanted["arguments"]))
    return Grade(True, same and calls[0]["name"] == wanted["name"])


_TYPES: dict[str, type] = {"string": str, "integer": int, "boolean": bool}


def _is_call(lesson: Lesson, call: dict[str, Any]) -> bool:
    """Whether a call fits the schema of an offered tool."""
    schema = next((tool for tool in lesson.tools if tool["name"] == call["name"]), None)
    arguments = _json(call["arguments"])
    if schema is None or not isinstance(arguments, dict):
        return False
    properties = schema["parameters"]["properties"]
    return arguments.keys() == properties.keys() and all(
        type(value) is _TYPES[properties[name]["type"]] for name, value in arguments.items()
    )


def _same(found: Any, wanted: Any) -> bool:
    """Equal, and of equal types: true is not 1."""
    return json.dumps(found, sort_keys=True) == json.dumps(wanted, sort_keys=True)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _result(text: str) -> int | None:
    """The last number of an answer."""
    numbers = re.findall(r"-?\d+", text)
    return int(numbers[-1]) if numbers else None
