"""Held-out code and prose as token ids, the same for every run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_deepinfer.lessons.encoder import Encoder
from vllm_deepinfer.lessons.stream import Document, DocumentKind, of_kind

LEAST = 200
"""Shorter documents are left out: they say little about a context."""


@dataclass(frozen=True)
class Text:
    """Attributes:
    ids: with the begin of sentence first.
    learnt: per token, whether its loss counts.
    characters: of the tokens that count.
    """

    ids: tuple[int, ...]
    learnt: tuple[bool, ...]
    characters: int


def heldout(encoder: Encoder, kind: DocumentKind, tokens: int) -> list[Text]:
    """Documents of a kind that were held out, at least ``tokens`` tokens in all."""
    found: list[Text] = []
    total = 0
    for document in of_kind(kind, 0, "heldout", encoder):
        if total >= tokens:
            break
        if len(document.tokens) >= LEAST or kind not in ("code", "prose"):
            found.append(_text(encoder, document))
            total += len(document.tokens)
    return found


def shuffled(texts: Sequence[Text], seed: int = 0) -> list[Text]:
    """The tokens of each text in a random order: nothing can be foreseen but how often they occur."""
    mixed = []
    for number, text in enumerate(texts):
        rest = list(text.ids[1:])
        random.Random(f"{seed} {number}").shuffle(rest)
        mixed.append(Text((text.ids[0], *rest), text.learnt, text.characters))
    return mixed


def _text(encoder: Encoder, document: Document) -> Text:
    learnt = [token for token, counts in zip(document.tokens, document.mask, strict=True) if counts]
    return Text(tuple(document.tokens), tuple(document.mask), len(encoder.decode(learnt)))
