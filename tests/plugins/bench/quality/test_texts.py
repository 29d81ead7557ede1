"""Held-out texts."""

from __future__ import annotations

from vllm_deepinfer_plugins.bench.quality.texts import LEAST, heldout, shuffled

from vllm_deepinfer.lessons.encoder import Encoder
from vllm_deepinfer.lessons.vocabulary import tokenizer

ENCODER = Encoder(tokenizer())


def test_as_many_tokens_as_asked_and_the_same_every_time() -> None:
    texts = heldout(ENCODER, "code", 3000)
    assert texts == heldout(ENCODER, "code", 3000)
    assert sum(len(text.ids) for text in texts) >= 3000
    assert sum(len(text.ids) for text in texts[:-1]) < 3000
    for text in texts:
        assert len(text.ids) >= LEAST
        assert text.characters == len(ENCODER.decode(text.ids[1:]))


def test_lessons_count_their_answers() -> None:
    for text in heldout(ENCODER, "json", 500):
        assert len(text.ids) == len(text.learnt)
        assert 0 < sum(text.learnt) < len(text.ids)
        assert text.characters > 10


def test_shuffled_texts_hold_the_same_tokens() -> None:
    texts = heldout(ENCODER, "prose", 600)
    for text, mixed in zip(texts, shuffled(texts), strict=True):
        assert sorted(text.ids) == sorted(mixed.ids) and text.ids != mixed.ids
        assert mixed.ids[0] == text.ids[0] == ENCODER.bos
