"""The 2,048 tokens of the trained checkpoint, and how they were learnt.

The standard library differs between versions of Python, so what was learnt is kept in
``data/tokenizer.json``; `learn` says how. Digits are tokens of their own, because sums are
learnt digit by digit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files

from tokenizers import Tokenizer, pre_tokenizers, trainers

from vllm_deepinfer.checkpoint.tokenizer import CONTROL_TOKENS, tokenizer_document

from .corpus import Piece, code, prose
from .generator import KINDS, lesson
from .rendering import render

SIZE = 2048
CODE_CHARS, PROSE_CHARS, LESSONS_PER_KIND = 3_000_000, 700_000, 400
_DIGITS = {"type": "Split", "pattern": {"Regex": r"\p{N}"}, "behavior": "Isolated", "invert": False}


@cache
def tokenizer() -> Tokenizer:
    """The tokenizer of the trained checkpoint."""
    return Tokenizer.from_str((files(__package__) / "data" / "tokenizer.json").read_text(encoding="utf-8"))


def learn(texts: Iterator[str], size: int = SIZE) -> Tokenizer:
    """Byte-level BPE with V4.1's control tokens in front and its pre-tokenisation.

    While merges are learnt digits stand alone, so no merge joins two.
    """
    start = tokenizer_document([], ())
    start["added_tokens"] = []
    start["pre_tokenizer"]["pretokenizers"].insert(0, _DIGITS)
    learner = Tokenizer.from_str(json.dumps(start))
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    model = json.loads(learner.to_str())["model"]
    learnt = sorted(model["vocab"], key=model["vocab"].__getitem__)
    names = [*(text for text, _ in CONTROL_TOKENS), *learnt]
    names += [f"<｜place▁holder▁no▁{number}｜>" for number in range(size - len(names))]
    merges = tuple((left, right) for left, right in model["merges"])
    return Tokenizer.from_str(json.dumps(tokenizer_document(names, merges), ensure_ascii=False))


def sample(lessons: int = LESSONS_PER_KIND) -> Iterator[str]:
    """What the tokens were learnt from: code, prose and the text of lessons between control tokens."""
    yield from _spread(code("train"), CODE_CHARS)
    yield from _spread(prose("train"), PROSE_CHARS)
    yield from lesson_texts(lessons)


def lesson_texts(count: int) -> Iterator[str]:
    """Text between the control tokens of so many lessons of each kind."""
    for kind in KINDS:
        for number in range(count):
            rendered = render(lesson(kind, "vocabulary", number, "train"))
            place = 0
            for start, stop in (*rendered.special, (len(rendered.text), 0)):
                if start > place:
                    yield rendered.text[place:start]
                place = stop


def _spread(pieces: tuple[Piece, ...], chars: int) -> Iterator[str]:
    """Every n-th piece, so that about ``chars`` characters come from all modules."""
    step = max(1, sum(len(piece.text) for piece in pieces) // chars)
    for piece in pieces[::step]:
        yield piece.text
