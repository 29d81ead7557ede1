"""Repeat what was said: lists of words and numbers, word for word."""

from __future__ import annotations

from ..draw import Draw, Templates
from ..lesson import Lesson
from ..words import COMMON, KEYS, WORDS, invented
from .chat import Pair, conversation

_AFTER = ("{}: {{}}", '{} "{{}}"', "{}:\n{{}}", "{}: {{}}")
_SAID = (
    "Repeat",
    "repeat",
    "Repeat after me",
    "Please repeat",
    "Please repeat after me",
    "Repeat this",
    "Repeat this text",
    "Repeat the following",
    "Repeat the following text",
    "Repeat exactly",
    "Say",
    "say",
    "Please say",
    "Say this",
    "Can you say",
    "Copy",
    "Copy this",
    "Copy this text",
    "Copy exactly",
    "Please copy",
    "Write",
    "Write this",
    "Please write",
    "Write exactly this",
    "Write down",
    "Echo",
    "Echo this",
    "Spell out",
    "Answer with",
    "Answer only with",
    "Tell me exactly this",
)
WORDINGS = Templates(
    tuple(way.format(said) for said in _SAID for way in _AFTER),
    ("Please copy this: {}", "Say exactly this: {}"),
)


def part(draw: Draw) -> str:
    """A word, a number, or what nobody has seen."""
    kind = draw.rng.random()
    if kind < 0.15:
        return str(draw.rng.randint(0, 99))
    if kind < 0.45:
        return draw.of(KEYS + WORDS)
    if kind < 0.75:
        return draw.of(COMMON)
    word = invented(draw.rng)
    return word.capitalize() if draw.chance(0.4) else word


def repeat(draw: Draw) -> Pair:
    """Three to twelve words and small numbers, or up to sixty: more than a window holds."""

    def make() -> str:
        count = draw.rng.randint(3, 60 if draw.chance(0.35) else 12)
        text = " ".join(part(draw) for _ in range(count))
        return f"{text[0].upper()}{text[1:]}{draw.of('.!')}" if draw.chance(0.25) else text

    text = draw.made("copy", make)
    return draw.template(WORDINGS).format(text), "I repeat the text.", text


def copying(draw: Draw) -> Lesson:
    """Up to four texts."""
    return conversation(draw, "copy", repeat, most=4, thinking=0.15)
