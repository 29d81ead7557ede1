"""Values are of their side, and what is invented is new and plain."""

from __future__ import annotations

import random

import pytest

from vllm_deepinfer.lessons import values
from vllm_deepinfer.lessons.draw import Draw
from vllm_deepinfer.lessons.split import Split, side_of
from vllm_deepinfer.lessons.words import CITIES, COMMON, KEYS, NAMES, NOUNS, PEOPLE, PLACES, WORDS, invented

MAKERS = {
    "person": values.person,
    "place": values.place,
    "title": values.title,
    "file_name": values.file_name,
    "sentence": lambda draw: values.sentence(draw, 3, 6),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_what_a_value_is_made_of_is_of_its_side(maker: str, split: Split) -> None:
    draw = Draw(random.Random(0), split)
    made = [MAKERS[maker](draw) for _ in range(300)]
    assert len(set(made)) > (25 if maker == "place" and split == "heldout" else 100)
    assert draw.values and all(side_of(value) == split for value in draw.values)
    assert all(text == text.strip() and "\n" not in text for text in made)


def test_known_and_unknown_ones_both_occur() -> None:
    draw = Draw(random.Random(1), "train")
    people = {values.person(draw) for _ in range(300)}
    assert people & set(NAMES) and people & set(PEOPLE) and people - set(NAMES) - set(PEOPLE)
    places = {values.place(draw) for _ in range(300)}
    assert places & set(PLACES) and places & set(CITIES) and places - set(PLACES) - set(CITIES)


def test_lists_are_apart_so_that_no_value_is_a_part_of_another() -> None:
    lists = [set(words) for words in (KEYS, NOUNS, WORDS, COMMON, CITIES, PEOPLE)]
    assert sum(map(len, lists)) == len(set().union(*lists))
    parts = {part for name in (*NAMES, *PLACES) for part in name.split()}
    assert not parts & (set(CITIES) | set(PEOPLE))


def test_invented_words_are_many_and_plain() -> None:
    found = {invented(random.Random(number)) for number in range(2000)}
    assert len(found) > 1900
    assert all(
        word.isascii() and word.isalpha() and word.islower() and 4 <= len(word) <= 15 for word in found
    )
