"""Documents to learn from, endless, in a fixed mix of tokens, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Literal, cast

from tokenizers import Tokenizer

from .corpus import Piece, code, prose
from .encoder import Encoder
from .generator import lesson
from .lesson import Kind
from .recall import recalls
from .split import Split

DocumentKind = Literal["code", "prose", "recall"] | Kind
MIX: Mapping[DocumentKind, float] = {
    "code": 0.42,
    "prose": 0.08,
    "tools": 0.11,
    "json": 0.05,
    "recall": 0.08,
    "retrieval": 0.10,
    "copy": 0.04,
    "arithmetic": 0.06,
    "reasoning": 0.01,
    "chat": 0.05,
}
"""Shares of all tokens, prompts included."""


@dataclass(frozen=True, slots=True)
class Document:
    """Attributes:
    tokens: ids, beginning with the begin of sentence.
    mask: whether a token is to be predicted: answers with their end of sentence, all of code and prose.
    """

    tokens: list[int]
    mask: list[bool]
    kind: DocumentKind


def documents(
    seed: int, split: Split, tokenizer: Tokenizer, mix: Mapping[DocumentKind, float] = MIX
) -> Iterator[Document]:
    """Endless. The kind that is furthest behind its share of tokens comes next.

    Args:
        seed: Of lessons and of the order of code and prose.
        mix: Shares of tokens by kind.
    """
    encoder = Encoder(tokenizer)
    streams = {kind: of_kind(kind, seed, split, encoder) for kind in mix}
    given = dict.fromkeys(mix, 0)
    total = 0
    while True:
        kind = max(mix, key=lambda name: mix[name] * total - given[name])
        document = next(streams[kind])
        given[kind] += len(document.tokens)
        total += len(document.tokens)
        yield document


def of_kind(kind: DocumentKind, seed: int, split: Split, encoder: Encoder) -> Iterator[Document]:
    """Endless documents of one kind."""
    if kind in ("code", "prose"):
        yield from _texts(kind, seed, split, encoder)
    if kind == "recall":
        for tokens, mask in recalls(seed, split, encoder):
            yield Document(tokens, mask, kind)
    for number in count():
        tokens, mask = encoder.lesson(lesson(cast(Kind, kind), seed, number, split))
        yield Document(tokens, mask, kind)


def _texts(kind: DocumentKind, seed: int, split: Split, encoder: Encoder) -> Iterator[Document]:
    """All pieces in a random order, then all in another; encoded once."""
    pieces = (code if kind == "code" else prose)(split)
    encoded: list[Document | None] = [None] * len(pieces)
    for epoch in count():
        order = list(range(len(pieces)))
        random.Random(f"{seed} {kind} {epoch}").shuffle(order)
        for index in order:
            known = encoded[index]
            if known is None:
                known = encoded[index] = text_document(kind, pieces[index], encoder)
            yield known


def text_document(kind: DocumentKind, piece: Piece, encoder: Encoder) -> Document:
    """A piece of code or prose; the end of its module is the end of the sentence."""
    ids = encoder.text(piece.text)
    end = [encoder.eos] * piece.last
    tokens = [encoder.bos, *ids, *end]
    return Document(tokens, [False, *[True] * (len(tokens) - 1)], kind)
