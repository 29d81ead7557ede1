"""A lesson: a conversation whose answers are known, and can be checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, Any]
Kind = Literal["chat", "reasoning", "arithmetic", "copy", "retrieval", "tools", "json"]
MODEL = "lessons"


@dataclass(frozen=True)
class Lesson:
    """A conversation in the form of Chat Completions, with the right answers in it.

    Attributes:
        messages: role and content as a client sends them; every assistant message is an answer to learn.
        thinking: whether the answers are preceded by reasoning. Without tools only the last message may
            have some: the prompt format drops the reasoning of earlier turns.
        effort: `reasoning_effort` of the request, or None for what the server takes by default.
        templates, values: what the lesson was made of, for the tests of the split.
    """

    kind: Kind
    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    thinking: bool = False
    effort: str | None = None
    json_output: bool = False
    templates: frozenset[str] = field(default=frozenset(), compare=False)
    values: frozenset[str] = field(default=frozenset(), compare=False)

    def body(self, turn: int | None = None) -> dict[str, Any]:
        """The request whose answer is message number ``turn``; None: the whole conversation."""
        body: dict[str, Any] = {"model": MODEL, "messages": list(self.messages[:turn])}
        body["thinking"] = {"type": "enabled" if self.thinking else "disabled"}
        if self.tools:
            body["tools"] = [{"type": "function", "function": tool} for tool in self.tools]
        if self.effort is not None and self.thinking:
            body["reasoning_effort"] = self.effort
        if self.json_output:
            body["response_format"] = {"type": "json_object"}
        return body

    @property
    def answers(self) -> tuple[int, ...]:
        """Numbers of the assistant's messages that are learnt and graded."""
        turns = [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]
        return tuple(turns if self.tools or not self.thinking else turns[-1:])


def user(content: str) -> Message:
    """What a user says."""
    return {"role": "user", "content": content}


def assistant(content: str, reasoning: str | None = None) -> Message:
    """What the model is to answer."""
    message = {"role": "assistant", "content": content}
    return message if reasoning is None else message | {"reasoning_content": reasoning}
