"""Lists that are said again: every value follows from the first list, on one side of the split."""

from __future__ import annotations

from itertools import islice

from vllm_deepinfer.lessons.encoder import Encoder
from vllm_deepinfer.lessons.recall import FEWEST, LISTS, recalls
from vllm_deepinfer.lessons.split import Split, side_of
from vllm_deepinfer.lessons.vocabulary import tokenizer
from vllm_deepinfer.lessons.words import KEYS, WORDS

ENCODER = Encoder(tokenizer())
(LINE,) = ENCODER.text("\n")


def taken(split: Split, seed: int = 0) -> list[tuple[list[int], list[bool]]]:
    return list(islice(recalls(seed, split, ENCODER), 60))


def lines_of(ids: list[int]) -> list[tuple[int, ...]]:
    """Ids of each line, without its end."""
    found: list[tuple[int, ...]] = []
    rest = ids[1:-1]
    while rest:
        end = rest.index(LINE)
        found.append(tuple(rest[:end]))
        rest = rest[end + 1 :]
    return found


def in_words(lines: list[tuple[int, ...]]) -> set[str] | None:
    """The lines' texts, if they are of the keys and words of a retrieval."""
    texts = {ENCODER.decode(line) for line in lines}
    pairs = [text.split(" ") for text in texts]
    known = all(len(pair) == 2 and pair[0] in KEYS and pair[1] in WORDS for pair in pairs)
    return texts if known else None


def test_what_is_asked_follows_from_the_first_list() -> None:
    sizes: dict[bool, set[int]] = {True: set(), False: set()}
    for ids, mask in taken("train"):
        assert ids[0] == ENCODER.bos and ids[-1] == ENCODER.eos and len(ids) == len(mask)
        lines = lines_of(ids)
        size = len(lines) // LISTS
        sizes[in_words(lines) is not None].add(size)
        keys = [line[0] for line in lines[:size]]
        assert len(set(keys)) == size >= FEWEST, "a key occurs once"
        for number in range(LISTS):
            assert sorted(lines[number * size : (number + 1) * size]) == sorted(lines[:size])
        first = 1 + sum(len(line) + 1 for line in lines[:size])
        assert not any(mask[:first]), "nothing of the first list is asked for"
        wanted = [False, *[True] * 99]
        expected = [counts for line in lines[size:] for counts in wanted[: len(line) + 1]]
        assert mask[first:] == [*expected, True], "a value and the end of its line are"
    assert min(sizes[True]) < 6 and max(sizes[True]) > 40
    assert min(sizes[False]) < 6 and max(sizes[False]) > 25


def test_any_token_that_is_text_occurs() -> None:
    words = set(ENCODER.words)
    assert 1700 < len(words) < 2048 and LINE not in words and not {ENCODER.bos, ENCODER.eos} & words
    unknown = [lines for ids, _ in taken("train") if in_words(lines := lines_of(ids)) is None]
    assert 15 < len(unknown) < 45, "half of the lists"
    seen = {token for lines in unknown for line in lines for token in line}
    assert seen <= words and len(seen) > 700
    assert {len(line) for lines in unknown for line in lines} == {2, 3, 4, 5}


def test_pairs_are_of_one_side_and_a_seed_says_which() -> None:
    sides: tuple[Split, ...] = ("train", "heldout")
    for split in sides:
        assert taken(split) == taken(split) != taken(split, seed=1)
        for ids, _ in taken(split):
            for text in in_words(lines_of(ids)) or ():
                assert side_of(f"pair:{text}") == split
