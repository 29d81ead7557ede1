"""Documents into rows of one length, the same for a seed and a step whatever ran before.

Steps fall into chunks, and each chunk has a stream of documents of its own: to resume at a step, no more than
the steps of its chunk are packed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_deepinfer.lessons.stream import Document

CHUNK = 64
"""Steps that share a stream of documents."""
_HELD = 16
"""Lessons that may wait for the next row; a row with more of them before it is filled up."""
_SPLIT = frozenset({"code", "prose"})
_NEVER_CUT = frozenset({"retrieval"})
"""What is asked for stands at the end. Of any other lesson the first turns make sense alone."""

LESSON = 4.0
"""How much a target in a lesson counts: of a retrieval's thousand tokens a few are asked for."""

Source = Callable[[int, int], Iterator[Document]]
"""An endless stream of documents for a seed, at a step: what is taught may change."""


@dataclass(frozen=True)
class Batch:
    """Rows of packed documents.

    Attributes:
        ids: [rows, length] int64.
        targets: [rows, length] int64, the next token, or −100 where the loss does not count.
        weights: [rows, length] float32, how much a target counts: 1, `LESSON` in lessons, 0 for none.
    """

    ids: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


def batch_at(source: Source, seed: int, step: int, shape: tuple[int, int], pad: int) -> Batch:
    """The batch of one step: `batches` from there on, once."""
    return next(batches(source, seed, step, lambda _: shape, pad))


def batches(
    source: Source, seed: int, start: int, shape: Callable[[int], tuple[int, int]], pad: int
) -> Iterator[Batch]:
    """Batches of the steps from ``start`` on.

    Args:
        source: Gives the documents of a chunk for a seed of its own.
        shape: Rows and length of a step.
        pad: Token that fills a row that no document fits into.
    """
    step = start // CHUNK * CHUNK
    while True:
        rows = _Packer(source(seed * 1_000_003 + step // CHUNK, step), pad)
        for _ in range(CHUNK):
            count, length = shape(step)
            packed = [rows.row(length) for _ in range(count)]
            if step >= start:
                yield _batch(packed)
            step += 1


def _batch(rows: list[tuple[NDArray[np.int64], NDArray[np.float32]]]) -> Batch:
    ids = torch.from_numpy(np.stack([tokens for tokens, _ in rows]))
    weights = torch.from_numpy(np.stack([weight for _, weight in rows])).roll(-1, dims=1)
    weights[:, -1] = 0
    return Batch(ids, torch.where(weights > 0, ids.roll(-1, dims=1), -100), weights)


class _Packer:
    """Fills rows in the order of the stream, so that its shares of tokens are those of the rows.

    Code and prose are split: what does not fit any more begins a later row. A lesson is whole; one that does
    not fit waits for the beginning of the next row.
    """

    def __init__(self, documents: Iterator[Document], pad: int) -> None:
        self.documents, self.pad = documents, pad
        self.held: deque[Document] = deque()
        self.rest: Document | None = None

    def row(self, length: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens of a row, and how much each counts as a target."""
        tokens = np.full(length, self.pad, dtype=np.int64)
        weights = np.zeros(length, dtype=np.float32)
        used = 0
        while used < length:
            document = self._take(length - used, length)
            if document is None:
                break
            part = slice(used, min(length, used + len(document.tokens)))
            tokens[part] = document.tokens[: part.stop - used]
            weights[part] = document.mask[: part.stop - used]
            weights[part] *= 1.0 if document.kind in _SPLIT else LESSON
            if len(document.tokens) > part.stop - used:
                self.rest = _part(document, slice(part.stop - used, None))
            used = part.stop
        return tokens, weights

    def _take(self, room: int, length: int) -> Document | None:
        for number, document in enumerate(self.held):
            if len(document.tokens) <= room:
                del self.held[number]
                return document
        if self.rest is not None:
            rest, self.rest = self.rest, None
            return rest
        while len(self.held) < _HELD:
            document = next(self.documents)
            if document.kind not in _SPLIT and len(document.tokens) > length:
                if document.kind in _NEVER_CUT:
                    continue
                document = _part(document, slice(length))
            if document.kind in _SPLIT or len(document.tokens) <= room:
                return document
            self.held.append(document)
        return None


def _part(document: Document, part: slice) -> Document:
    return replace(document, tokens=document.tokens[part], mask=document.mask[part])
