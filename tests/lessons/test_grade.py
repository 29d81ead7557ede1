"""Right answers pass, and each way of being wrong is seen."""

import pytest

from vllm_deepinfer.lessons.encoder import Encoder
from vllm_deepinfer.lessons.generator import KINDS, lesson
from vllm_deepinfer.lessons.grade import Grade, grade, read
from vllm_deepinfer.lessons.lesson import Kind, Lesson, assistant, user
from vllm_deepinfer.lessons.rendering import END, render
from vllm_deepinfer.lessons.vocabulary import tokenizer

ENCODER = Encoder(tokenizer())
TOOL = {
    "name": "set_light",
    "description": "",
    "parameters": {
        "type": "object",
        "properties": {"room": {"type": "string"}, "on": {"type": "boolean"}},
        "required": ["room", "on"],
    },
}
CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "set_light", "arguments": '{"room": "hall", "on": true}'},
}
TOOLS = Lesson(
    "tools",
    (user("Light on in the hall."), {"role": "assistant", "content": None, "tool_calls": [CALL]}),
    tools=(TOOL,),
)
RIGHT = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="set_light">\n'
    '<｜DSML｜ parameter name="room" string="true">hall</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="on" string="false">true</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_what_is_taught_is_right(kind: Kind, split: str) -> None:
    for number in range(8):
        taught = lesson(kind, "grades", number, "train" if split == "train" else "heldout")
        rendered = render(taught)
        for turn, (start, stop) in zip(taught.answers, rendered.answers, strict=True):
            output = rendered.text[start:stop].removesuffix(END)
            assert grade(taught, turn, output) == Grade(True, True)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (RIGHT, Grade(True, True)),
        (RIGHT.replace("hall", "office"), Grade(True, False)),
        (RIGHT.replace(">true<", ">false<"), Grade(True, False)),
        (RIGHT.replace(">true<", ">1<"), Grade(False, False)),
        (RIGHT.replace("set_light", "set_lamp"), Grade(False, False)),
        (RIGHT.replace('name="on"', 'name="off"'), Grade(False, False)),
        (RIGHT.replace(' calls>\n<｜DSML｜ invoke name="set_light">', " calls>\n"), Grade(False, False)),
        ("The light is on.", Grade(False, False)),
        ("", Grade(False, False)),
    ],
)
def test_tool_calls(output: str, expected: Grade) -> None:
    assert grade(TOOLS, 1, output) == expected


def test_two_calls_are_one_too_many() -> None:
    begin, end = RIGHT.index("<｜DSML｜ invoke"), RIGHT.index("</｜DSML｜ calls>")
    twice = RIGHT[:end] + RIGHT[begin:end] + RIGHT[end:]
    assert grade(TOOLS, 1, twice) == Grade(True, False)


def test_what_was_cut_off_is_wrong() -> None:
    assert grade(TOOLS, 1, RIGHT, ended=False) == Grade(False, False)
    copied = Lesson("copy", (user("Say: a b"), assistant("a b")))
    assert grade(copied, 1, "a b", ended=False) == Grade(True, False)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ('{"age": 3, "open": true}', Grade(True, True)),
        ('{"open":true,"age":3}', Grade(True, True)),
        ('{"age": 3, "open": 1}', Grade(True, False)),
        ('{"age": 3}', Grade(True, False)),
        ('{"age": 3, "open": tru', Grade(False, False)),
        ("[3]", Grade(False, False)),
    ],
)
def test_json(output: str, expected: Grade) -> None:
    asked = Lesson("json", (user("As JSON: age 3, open true."), assistant('{"age": 3, "open": true}')))
    assert grade(asked, 1, output) == expected


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("2 + 4 = 6, carry 0. So 12 + 4 = 16.", Grade(True, True)),
        ("16", Grade(True, True)),
        ("12 + 4 = 17.", Grade(True, False)),
        ("I do not know.", Grade(False, False)),
    ],
)
def test_sums(output: str, expected: Grade) -> None:
    asked = Lesson("arithmetic", (user("12 + 4"), assistant("12 + 4 = 16.")))
    assert grade(asked, 1, output) == expected


def test_reasoning_is_not_the_answer() -> None:
    asked = Lesson("copy", (user("Say: a b"), assistant("a b", "I repeat.")), thinking=True)
    assert read(asked, 1, "I repeat.</think>a b")["content"] == "a b"
    assert grade(asked, 1, "hm</think>a b") == Grade(True, True)
    assert grade(asked, 1, "a b") == Grade(False, False)
