"""Lessons as the gateway renders them: text, where its control tokens are, and where its answers are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

from deepseek_recipe import (
    ChatCompletionRequest,
    ConversationRequest,
    ConversionOptions,
    DeepseekV41Encoding,
    ModelVersion,
)

from .lesson import MODEL, Lesson

ASSISTANT, THINK, END_THINK, END = (
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "<｜end▁of▁sentence｜>",
)


@dataclass(frozen=True)
class Rendered:
    """Attributes:
    text: the conversation.
    special: half-open ranges of code points that are control tokens, in order.
    answers: half-open ranges of code points that the model is to write, each with its end of sentence.
    """

    text: str
    special: tuple[tuple[int, int], ...]
    answers: tuple[tuple[int, int], ...]


def convert(lesson: Lesson, turn: int | None = None) -> ConversationRequest:
    """The request, converted as the gateway does it."""
    return ChatCompletionRequest(json.dumps(lesson.body(turn)).encode()).convert(_options())


def prompt(lesson: Lesson, turn: int) -> Rendered:
    """What the engine gets for the request whose answer is message ``turn``."""
    found = _encoding().render_conversation(convert(lesson, turn).conversation)
    return Rendered(found.prompt, tuple(found.special_ranges), ())


def render(lesson: Lesson) -> Rendered:
    """The whole conversation up to the end of its last answer."""
    if lesson.thinking and not lesson.tools:
        return _with_reasoning(lesson)
    found = _encoding().render_conversation(convert(lesson).conversation)
    text, special = found.prompt, [tuple(span) for span in found.special_ranges]
    answers = []
    for number, (start, stop) in enumerate(special):
        if text[start:stop] != ASSISTANT:
            continue
        begin = special[number + 1][1]  # behind <think> or </think>, which belongs to the prompt
        end = next((after for at, after in special[number + 2 :] if text[at:after] == END), None)
        if end is None:
            text, special = text[:start], special[:number]  # the prompt of an answer that is not there
            break
        answers.append((begin, end))
    kept = answers[-len(lesson.answers) :]
    return Rendered(text, tuple((start, stop) for start, stop in special), tuple(kept))


def _with_reasoning(lesson: Lesson) -> Rendered:
    """The last answer with its reasoning, which the format drops from a conversation that is over."""
    asked, answer = prompt(lesson, len(lesson.messages) - 1), lesson.messages[-1]
    special, text = list(asked.special), asked.text
    for part, mark in ((answer["reasoning_content"], END_THINK), (answer["content"], END)):
        text += part + mark
        special.append((len(text) - len(mark), len(text)))
    return Rendered(text, tuple(special), ((len(asked.text), len(text)),))


@cache
def _options() -> ConversionOptions:
    return ConversionOptions().with_model_versions_by_name({MODEL: ModelVersion.DeepseekV41Flash})


@cache
def _encoding() -> DeepseekV41Encoding:
    return DeepseekV41Encoding()
