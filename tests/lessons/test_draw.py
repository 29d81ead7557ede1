"""Draws keep to their side and remember what they took."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.lessons.draw import Draw, Templates, commands
from vllm_deepinfer.lessons.split import Split, side_of

SIDES = st.sampled_from(["train", "heldout"])


@given(st.integers(), SIDES)
def test_numbers_are_in_range_and_on_their_side(seed: int, split: Split) -> None:
    draw = Draw(random.Random(seed), split)
    numbers = {draw.number("age", 1, 99) for _ in range(20)}
    assert all(1 <= number <= 99 and side_of(f"age:{number}") == split for number in numbers)
    assert draw.values == {f"age:{number}" for number in numbers}


@given(st.integers(), SIDES)
def test_values_are_of_the_pool_and_on_their_side(seed: int, split: Split) -> None:
    pool = [f"value {number}" for number in range(100)]
    draw = Draw(random.Random(seed), split)
    chosen = draw.value("thing", pool)
    assert chosen in pool
    assert side_of(f"thing:{chosen}") == split
    assert draw.values == {f"thing:{chosen}"}


def test_templates_of_the_sides_are_apart() -> None:
    wordings = Templates(("a", "b"), ("c",))
    seen = {split: Draw(random.Random(1), split) for split in ("train", "heldout")}
    for draw in seen.values():
        for _ in range(20):
            draw.template(wordings)
    assert seen["train"].templates == {"a", "b"}
    assert seen["heldout"].templates == {"c"}


def test_a_command_is_asked_for_in_many_ways_but_not_in_those_held_out() -> None:
    wordings = commands(("find {}", "look for {}"), ("Where is {}?",), ("Please find {}.", "Seek {}."))
    assert wordings.heldout == ("Please find {}.", "Seek {}.")
    assert {"Find {}.", "find {}", "Could you find {}?", "Please look for {}.", "Where is {}?"} <= set(
        wordings.train
    )
    assert not set(wordings.train) & set(wordings.heldout)
    assert len(set(wordings.train)) == len(wordings.train) > 40
    assert all(one.count("{}") == 1 for one in wordings.train)


def test_a_pool_without_values_on_a_side_is_refused() -> None:
    alone = next(str(number) for number in range(99) if side_of(f"kind:{number}") == "train")
    with pytest.raises(ValueError, match="no value of kind is on the side heldout"):
        Draw(random.Random(0), "heldout").value("kind", [alone])


def test_the_same_seed_draws_the_same() -> None:
    def drawn() -> list[object]:
        draw = Draw(random.Random("seed"), "train")
        return [draw.number("n", 0, 999), draw.of("abc"), draw.chance(0.5), draw.made("x", lambda: "text")]

    assert drawn() == drawn()
