"""Lessons by kind. A lesson follows from a seed, a number and a side of the split."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from ..draw import Draw
from ..lesson import Kind, Lesson
from ..split import Split
from .arithmetic import arithmetic
from .chat import chat
from .copying import copying
from .json_answers import json_answer
from .reasoning import reasoning
from .retrieval import retrieval
from .tools import tools

KINDS: Mapping[Kind, Callable[[Draw], Lesson]] = {
    "chat": chat,
    "reasoning": reasoning,
    "arithmetic": arithmetic,
    "copy": copying,
    "retrieval": retrieval,
    "tools": tools,
    "json": json_answer,
}


def lesson(kind: Kind, seed: int | str, number: int, split: Split) -> Lesson:
    """Lesson ``number`` of a kind; the same on every machine."""
    return KINDS[kind](Draw(random.Random(f"{seed} {split} {kind} {number}"), split))
