"""Short stories that end in a sum, with the reasoning in front of the answer."""

from __future__ import annotations

from ..draw import Draw
from ..lesson import Lesson
from ..words import FIRST_NAMES
from .arithmetic import STORIES, numbers, scratch_plus
from .chat import Pair, conversation

THINGS = ("apple", "book", "coin", "bottle", "pencil", "letter", "ball", "stone")


def story(draw: Draw) -> Pair:
    """Who has how many of what."""
    a, b = numbers(draw, "plus")
    question = draw.template(STORIES).format(a, b, draw.of(FIRST_NAMES), draw.of(THINGS))
    return question, f"I add {a} and {b}. {scratch_plus(a, b)}", f"The answer is {a + b}."


def reasoning(draw: Draw) -> Lesson:
    """One story; the client may have chosen how much effort it is worth."""
    return conversation(draw, "reasoning", story, most=1, thinking=1.0)
