"""The board says of a hold that it stands from `give` until `revoke`, and of nothing else."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pledges = pytest.importorskip("vllm_deepinfer_plugins.hand_over.pledges")


def word(board: Any, number: int) -> int:
    """As a peer reads it: eight bytes at an address."""
    return ctypes.c_uint64.from_address(pledges.word_at(board.address, number)).value


def test_a_hold_stands_until_it_is_revoked() -> None:
    board = pledges.PledgeBoard()
    assert word(board, 7) == pledges.REVOKED
    board.give("a", 7)
    assert word(board, 7) == 7 and len(board) == 1
    board.revoke("a")
    board.revoke("a")
    assert word(board, 7) == pledges.REVOKED and len(board) == 0


def test_one_that_was_fetched_can_still_be_checked() -> None:
    """The reader looks at the word after its notification may have arrived."""
    board = pledges.PledgeBoard()
    board.give("a", 7)
    board.fulfil("a")
    board.revoke("a")
    assert word(board, 7) == 7 and len(board) == 0


def test_a_later_hold_takes_the_place_and_the_earlier_one_s_end_does_not_touch_it() -> None:
    board = pledges.PledgeBoard()
    later = 7 + pledges.SLOTS
    board.give("a", 7)
    board.give("b", later)
    assert word(board, 7) == later != 7
    board.revoke("a")
    assert word(board, later) == later


@given(
    st.lists(st.tuples(st.sampled_from(["give", "revoke", "fulfil"]), st.sampled_from("abcd")), max_size=40)
)
def test_against_a_dictionary(script: list[tuple[str, str]]) -> None:
    board, standing, number = pledges.PledgeBoard(), dict[str, int](), 100
    fulfilled: set[int] = set()
    for what, name in script:
        if what == "give" and name not in standing:
            number += 1
            standing[name] = number
            board.give(name, number)
        elif what == "revoke":
            board.revoke(name)
            standing.pop(name, None)
        elif what == "fulfil":
            board.fulfil(name)
            fulfilled |= {standing.pop(name)} if name in standing else set()
        for one in range(100, number + 1):
            assert word(board, one) == (one if one in standing.values() or one in fulfilled else 0)
    assert len(board) == len(standing)
