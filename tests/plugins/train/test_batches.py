from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from vllm_deepinfer_plugins.train.batches import CHUNK, batches

from tests.plugins.train.tiny import source
from vllm_deepinfer.lessons.stream import Document


def take(count: int, start: int = 0, length: int = 64) -> list[torch.Tensor]:
    return [batch.ids for batch in islice(batches(source, 7, start, lambda _: (4, length), 2), count)]


def test_any_step_gives_the_batch_that_it_had() -> None:
    whole = take(CHUNK + 5)
    for start in (1, CHUNK - 1, CHUNK, CHUNK + 3):
        assert torch.equal(take(1, start)[0], whole[start])
    assert not torch.equal(whole[0], whole[CHUNK])


def test_targets_are_the_next_tokens_that_count() -> None:
    batch = next(batches(source, 7, 0, lambda _: (4, 64), 2))
    assert batch.ids.shape == batch.targets.shape == (4, 64)
    counted = batch.targets[:, :-1] >= 0
    assert torch.equal(batch.targets[:, :-1][counted], batch.ids[:, 1:][counted])
    assert bool((batch.targets[:, -1] == -100).all())
    # The first token of a document (0 here) is never asked for.
    assert not bool((batch.targets == 0).any()) and bool((batch.ids == 0).any())


def fixed(*documents: tuple[int, str]) -> Iterator[Document]:
    """Documents of a length and a kind, each of one token id of its own; then short chats."""
    for number, (length, kind) in enumerate(documents):
        yield Document([10 + number] * length, [True] * length, kind)  # type: ignore[arg-type]
    while True:
        yield Document([9] * 3, [True] * 3, "chat")


def rows_of(*documents: tuple[int, str], rows: int = 2, length: int = 64) -> list[list[int]]:
    ids = next(batches(lambda *_: fixed(*documents), 0, 0, lambda _: (rows, length), 2)).ids
    return [row.tolist() for row in ids]


def test_code_is_split_and_goes_on_in_the_next_row() -> None:
    first, second = rows_of((40, "chat"), (100, "code"))
    assert first == [10] * 40 + [11] * 24 and second == [11] * 64


def test_a_lesson_that_does_not_fit_begins_the_next_row() -> None:
    first, second = rows_of((40, "chat"), (30, "tools"), (50, "prose"))
    assert first == [10] * 40 + [12] * 24
    assert second == [11] * 30 + [12] * 26 + [9, 9, 9, 9, 9, 9, 2, 2]


def test_what_is_longer_than_a_row() -> None:
    first, second = rows_of((100, "retrieval"), (100, "tools"), (10, "chat"))
    assert first == [11] * 64, "the beginning of a tool call's conversation"
    assert second[:10] == [12] * 10 and 10 not in first + second


def test_shares_of_the_rows_are_those_of_the_stream() -> None:
    kinds = {"code": (11, 600), "tools": (12, 300), "chat": (13, 50)}

    def mixed(*_: int) -> Iterator[Document]:
        given = dict.fromkeys(kinds, 0)
        while True:
            kind = min(kinds, key=lambda name: given[name])
            token, size = kinds[kind]
            given[kind] += size
            yield Document([token] * size, [True] * size, kind)  # type: ignore[arg-type]

    flat = torch.cat([b.ids for b in islice(batches(mixed, 0, 0, lambda _: (4, 512), 2), CHUNK)]).flatten()
    for token, _ in kinds.values():
        assert abs((flat == token).float().mean() - 1 / 3) < 0.02


def test_what_nothing_fits_is_padding_that_does_not_count() -> None:
    def chats(*_: int) -> Iterator[Document]:
        while True:
            yield Document([5] * 40, [True] * 40, "chat")

    batch = next(batches(chats, 0, 0, lambda _: (1, 64), 2))
    assert batch.ids[0, 40:].tolist() == [2] * 24
    assert batch.targets[0, 39:].tolist() == [-100] * 25
