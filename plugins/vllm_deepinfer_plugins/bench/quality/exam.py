"""Questions with held-out wordings and values, and what a set of answers is worth."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vllm_deepinfer.lessons.draw import Draw
from vllm_deepinfer.lessons.encoder import Encoder
from vllm_deepinfer.lessons.generator import lesson
from vllm_deepinfer.lessons.generator.retrieval import retrieval_at
from vllm_deepinfer.lessons.grade import grade
from vllm_deepinfer.lessons.lesson import Kind, Lesson

LONG = (1024, 2048, 4096, 8000)
"""Lengths, in tokens, at which a value is looked for; the last leaves room for an answer within 8,192."""
LONGER = 1.08
"""The generator's estimate of its sentences is that much above what they take in this vocabulary."""
SPARE = 24
"""Tokens that an answer may be longer than the right one before it is cut off."""
TURNS = 4
"""Of one conversation."""


@dataclass(frozen=True)
class Question:
    """One request. ``wave``: how many turns came before; it is asked when they were answered.

    Attributes:
        topic: the kind, with the length for long retrieval.
    """

    topic: str
    lesson: Lesson
    turn: int
    wave: int
    prompt: tuple[int, ...]
    most: int


@dataclass(frozen=True)
class Answer:
    """Token ids, and whether the model ended it itself."""

    ids: tuple[int, ...]
    ended: bool


@dataclass
class Score:
    """Counts of one topic."""

    asked: int = 0
    well_formed: int = 0
    exact: int = 0

    @property
    def shares(self) -> dict[str, float | int]:
        """As a report shows it."""
        return {
            "asked": self.asked,
            "well_formed": round(self.well_formed / self.asked, 4),
            "exact": round(self.exact / self.asked, 4),
        }


def questions(encoder: Encoder, lessons: Mapping[Kind, int], long: int) -> list[Question]:
    """So many lessons of each kind, and ``long`` lookups at each of the long lengths."""
    found: list[Question] = []
    for kind, count in lessons.items():
        for number in range(count):
            found += _asked(encoder, kind, lesson(kind, "exam", number, "heldout"))
    for tokens in LONG:
        for number in range(long):
            draw = Draw(random.Random(f"exam {tokens} {number}"), "heldout")
            found += _asked(encoder, f"retrieval_{tokens}", retrieval_at(draw, round(tokens * LONGER), 2))
    return found


def _asked(encoder: Encoder, topic: str, one: Lesson) -> list[Question]:
    ids, mask = encoder.lesson(one)
    found = []
    for wave, turn in enumerate(one.answers[:TURNS]):
        prompt = encoder.prompt(one, turn)
        right = next((at for at in range(len(prompt), len(ids)) if not mask[at]), len(ids)) - len(prompt)
        name = "tool_calls" if one.messages[turn].get("tool_calls") else topic
        found.append(Question(name, one, turn, wave, tuple(prompt), right + SPARE))
    return found


def scores(encoder: Encoder, asked: Sequence[Question], answers: Iterable[Answer]) -> dict[str, Score]:
    """Counts by topic; ``tools`` are answers with tools at hand that are no call."""
    found: dict[str, Score] = defaultdict(Score)
    for question, answer in zip(asked, answers, strict=True):
        seen = grade(question.lesson, question.turn, encoder.decode(answer.ids), ended=answer.ended)
        score = found[question.topic]
        score.asked += 1
        score.well_formed += seen.well_formed
        score.exact += seen.exact
    return dict(found)
