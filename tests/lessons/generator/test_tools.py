"""Calls fit their schemas, and hold what the question says."""

import json

import pytest

from vllm_deepinfer.lessons.generator import lesson
from vllm_deepinfer.lessons.generator.toolbox import TOOLS


@pytest.mark.parametrize("number", range(30))
def test_calls_fit_their_schema_and_copy_the_question(number: int) -> None:
    taught = lesson("tools", "calls", number, "heldout")
    schemas = {tool["name"]: tool["parameters"] for tool in taught.tools}
    types = {"string": str, "integer": int, "boolean": bool}
    for place, message in enumerate(taught.messages):
        for call in message.get("tool_calls", ()):
            schema = schemas[call["function"]["name"]]
            arguments = json.loads(call["function"]["arguments"])
            assert list(arguments) == schema["required"] == list(schema["properties"])
            question = taught.messages[place - 1]["content"]
            for name, value in arguments.items():
                assert type(value) is types[schema["properties"][name]["type"]]
                spoken = {True: " on ", False: " off "}[value] if isinstance(value, bool) else str(value)
                assert spoken in question.replace("Switch", "Turn")


def test_some_questions_need_no_tool() -> None:
    lessons = [lesson("tools", "calls", number, "train") for number in range(40)]
    silent = [
        one
        for one in lessons
        for place, message in enumerate(one.messages)
        if message["role"] == "user" and not one.messages[place + 1].get("tool_calls")
    ]
    assert silent
    assert {tool["name"] for one in lessons for tool in one.tools} == {tool.name for tool in TOOLS}


def test_a_result_is_repeated_in_the_answer() -> None:
    found = 0
    for number in range(60):
        messages = lesson("tools", "calls", number, "train").messages
        for place, message in enumerate(messages):
            if message["role"] == "tool" and message["content"] != "ok":
                assert message["content"] in messages[place + 1]["content"]
                found += 1
    assert found > 10
