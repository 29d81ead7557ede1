"""Tool calls with arguments copied from the question, answers from a tool's result, and no call where none is
needed."""

from __future__ import annotations

import json
from typing import Any

from ..draw import Draw
from ..lesson import Lesson, Message, assistant, user
from .chat import effort, small_talk
from .toolbox import TOOLS, Arguments, Tool


def call(tool: Tool, arguments: Arguments, number: int, reasoning: str | None) -> Message:
    """The assistant's message that calls a tool."""
    message: Message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": tool.name, "arguments": json.dumps(arguments)},
            }
        ],
    }
    return message if reasoning is None else message | {"reasoning_content": reasoning}


def turn(draw: Draw, offered: list[Tool], number: int, thinks: bool) -> list[Message]:
    """A question that needs a tool: question, call, result, answer."""
    tool = draw.of(offered)
    arguments = tool.arguments(draw)
    words: dict[str, Any] = {**arguments, "state": "on" if arguments.get("on") else "off"}
    result = tool.result(draw, arguments)
    return [
        user(draw.template(tool.wordings).format(**words)),
        call(tool, arguments, number, f"I use {tool.name}." if thinks else None),
        {"role": "tool", "tool_call_id": f"call_{number}", "content": result},
        assistant(tool.answer(arguments, result), "I have the result." if thinks else None),
    ]


def tools(draw: Draw) -> Lesson:
    """One to four tools are offered, and two to five questions asked; some need no tool."""
    thinks = draw.chance(0.3)
    offered = draw.rng.sample(TOOLS, draw.rng.randint(1, 4))
    messages: list[Message] = []
    for number in range(draw.rng.randint(2, 5)):
        if draw.chance(0.15):
            question, reasoning, answer = small_talk(draw)
            messages += [user(question), assistant(answer, reasoning if thinks else None)]
        else:
            messages += turn(draw, offered, number, thinks)
    return Lesson(
        "tools",
        tuple(messages),
        tools=tuple(tool.schema() for tool in offered),
        thinking=thinks,
        effort=effort(draw),
        templates=frozenset(draw.templates),
        values=frozenset(draw.values),
    )
