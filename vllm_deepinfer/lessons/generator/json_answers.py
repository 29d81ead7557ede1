"""Answers that are one JSON object, with the fields and values that the question gives."""

from __future__ import annotations

import json

from ..draw import Draw, commands
from ..lesson import Lesson, Message, assistant, user
from ..values import file_name, person, place, sentence, title
from ..words import WORDS
from .chat import effort

WORDINGS = commands(
    (
        "write as JSON: {}",
        "write this as JSON: {}",
        "give me this as JSON: {}",
        "make a JSON object: {}",
        "make a JSON object with {}",
        "answer in JSON: {}",
        "return JSON: {}",
        "return a JSON object with {}",
        "turn this into JSON: {}",
        "convert to JSON: {}",
    ),
    (
        "Give me JSON with {}.",
        "JSON, please: {}.",
        "JSON: {}",
        "As JSON: {}.",
        "{} as JSON",
        "{}. As a JSON object, please.",
        "In JSON: {}.",
    ),
    ("Please write as JSON: {}.", "Give me this as a JSON object: {}."),
)
NUMBERS = ("age", "count", "price", "size", "id", "year")
FLAGS = ("open", "ready", "active", "new")
PERSONS = ("name", "user", "author")
FIELDS = (*PERSONS, *NUMBERS, *FLAGS, "city", "place", "song", "title", "text", "color", "file")
SAID = ("{} {}", "{} {}", "{}: {}", "{} = {}", "{} is {}")


def field(draw: Draw, name: str) -> str | int | bool:
    """A value for a field, by its name."""
    if name in FLAGS:
        return draw.chance(0.5)
    if name in NUMBERS:
        return draw.number(name, 1, 99)
    if name in PERSONS:
        return person(draw)
    if name in ("city", "place"):
        return place(draw)
    if name in ("song", "title"):
        return title(draw)
    if name == "file":
        return file_name(draw)
    return sentence(draw, 2, 5) if name == "text" else draw.of(WORDS)


def spoken(value: str | int | bool) -> str:
    """The value as the question says it."""
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def json_answer(draw: Draw) -> Lesson:
    """One to four objects of two to four fields."""
    thinks = draw.chance(0.2)
    messages: list[Message] = []
    for _ in range(1 if thinks else draw.rng.randint(1, 4)):
        names = draw.rng.sample(FIELDS, draw.rng.randint(2, 4))
        document = {name: field(draw, name) for name in names}
        way = draw.of(SAID)
        said = ", ".join(way.format(name, spoken(value)) for name, value in document.items())
        reasoning = "I write one JSON object." if thinks else None
        messages += [
            user(draw.template(WORDINGS).format(said)),
            assistant(json.dumps(document), reasoning),
        ]
    return Lesson(
        "json",
        tuple(messages),
        thinking=thinks,
        effort=effort(draw),
        json_output=draw.chance(0.5),
        templates=frozenset(draw.templates),
        values=frozenset(draw.values),
    )
