"""Notes hold every key once, and are as long as asked."""

import random
import re

import pytest

from vllm_deepinfer.lessons.draw import Draw
from vllm_deepinfer.lessons.encoder import Encoder
from vllm_deepinfer.lessons.generator.retrieval import retrieval_at
from vllm_deepinfer.lessons.vocabulary import tokenizer

ENCODER = Encoder(tokenizer())


@pytest.mark.parametrize("tokens", [100, 1000, 4000, 8000])
def test_the_length(tokens: int) -> None:
    lesson = retrieval_at(Draw(random.Random(tokens), "heldout"), tokens, 1)
    assert 0.85 * tokens <= len(ENCODER.prompt(lesson, 1)) <= 1.15 * tokens + 30


def test_a_key_has_one_value_which_is_the_answer() -> None:
    for seed in range(20):
        lesson = retrieval_at(Draw(random.Random(seed), "train"), 400, 6)
        text = lesson.messages[0]["content"]
        lines = re.findall(r"^(\w+) (\w+)$", text, re.MULTILINE)
        known = dict(lines)
        assert len(known) == len(lines) >= 8
        for answer in lesson.messages[1::2]:
            key, value = answer["content"].split(" ")
            assert known[key] == value


def test_with_reasoning_the_key_is_named_first() -> None:
    lesson = retrieval_at(Draw(random.Random(0), "train"), 60, 1, thinks=True)
    key = lesson.messages[-1]["content"].split(" ")[0]
    assert lesson.messages[-1]["reasoning_content"] == f"I look for {key}."
