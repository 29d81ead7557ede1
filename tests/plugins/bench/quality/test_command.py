"""The exam is handed out in sheets."""

from __future__ import annotations

from itertools import pairwise

from vllm_deepinfer_plugins.bench.quality.command import EXAM, FIRST_LONG, SHEET, sheets
from vllm_deepinfer_plugins.bench.quality.exam import TURNS, questions

from vllm_deepinfer.lessons.encoder import Encoder
from vllm_deepinfer.lessons.vocabulary import tokenizer


def test_every_question_is_on_one_sheet_behind_the_turns_before_it() -> None:
    asked = questions(Encoder(tokenizer()), {kind: count // 3 for kind, count in EXAM.items()}, FIRST_LONG)
    handed = sheets(asked)
    assert [one for sheet in handed for one in sheet] == asked and len(handed) > 2
    for sheet in handed:
        assert sheet[0].wave == 0, "a conversation begins and ends on one sheet"
        assert len(sheet) < SHEET + TURNS
        for before, one in pairwise(sheet):
            assert one.wave == 0 or (one.wave == before.wave + 1 and one.lesson is before.lesson)


def test_nothing_to_ask() -> None:
    assert sheets([]) == []
