"""Prompts of both kinds of traffic."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from vllm_deepinfer_plugins.bench.verification.plan import PROMPT
from vllm_deepinfer_plugins.bench.verification.scripted import number_of
from vllm_deepinfer_plugins.bench.verification.traffic import KINDS, LONGEST, Lessons, numbered

from vllm_deepinfer.lessons.vocabulary import tokenizer


def test_a_prompt_says_which_request_it_is() -> None:
    prompts = numbered(600, 2048, seed=1)
    assert {len(prompt) for prompt in prompts} == {PROMPT}
    assert all(512 <= token < 2048 for prompt in prompts for token in prompt)
    heads = np.array([prompt[:2] for prompt in prompts], np.int32)
    assert number_of(heads).tolist() == list(range(600))
    assert prompts == numbered(600, 2048, seed=1) != numbered(600, 2048, seed=2)


def test_lessons_are_held_out_ones_and_never_come_twice(tmp_path: Path) -> None:
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    lessons = Lessons(tmp_path)
    easy = lessons.prompts("easy", 12)
    assert len({tuple(prompt) for prompt in easy}) == 12
    assert all(0 < len(prompt) <= LONGEST for prompt in easy)
    again = Lessons(tmp_path)
    assert again.prompts("easy", 6) == easy[:6] and again.prompts("easy", 6) == easy[6:]
    assert set(KINDS) == {"easy", "hard", "mixed"} and not set(KINDS["easy"]) & set(KINDS["hard"])
