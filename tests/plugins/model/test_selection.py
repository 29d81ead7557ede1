"""Selection against brute-force oracles: both rules for ties, candidate blocks, masks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_deepinfer_plugins.model.selection import Candidates, all_visible, selection_mask, top_positions

INF = math.inf
# Few distinct values, so that most rows have ties at the k-th place.
score = st.sampled_from([0.0, -0.0, 0.5, 1.0, 1.0, 2.0, -1.0, -INF, -INF])


@st.composite
def score_rows(draw: st.DrawFn) -> list[list[float]]:
    width = draw(st.integers(1, 40))
    return draw(st.lists(st.lists(score, min_size=width, max_size=width), min_size=1, max_size=4))


def lowest_first(row: list[float], k: int) -> list[int]:
    """Sort by score, then by position; increasing, padded with −1."""
    legal = [position for position in range(len(row)) if row[position] > -INF]
    best = sorted(legal, key=lambda position: (-row[position], position))[:k]
    return sorted(best) + [-1] * (k - len(best))


@given(rows=score_rows(), k=st.integers(1, 44))
@settings(max_examples=150)
def test_by_position_takes_the_lower_of_equals(rows: list[list[float]], k: int) -> None:
    found = top_positions(torch.tensor(rows), k, by_position=True)
    assert found.dtype == torch.int64
    assert found.tolist() == [lowest_first(row, k) for row in rows]


@given(rows=score_rows(), k=st.integers(1, 44), more=st.integers(0, 300))
@settings(max_examples=60)
def test_by_position_ignores_the_width_of_the_row(rows: list[list[float]], k: int, more: int) -> None:
    wide = [[*row, *[-INF] * more] for row in rows]
    narrow = top_positions(torch.tensor(rows), k, by_position=True)
    assert torch.equal(top_positions(torch.tensor(wide), k, by_position=True), narrow)


@given(rows=score_rows(), k=st.integers(1, 44))
@settings(max_examples=150)
def test_ordinary_rule_takes_what_topk_takes(rows: list[list[float]], k: int) -> None:
    scores = torch.tensor(rows)
    width = scores.shape[1]
    found = top_positions(scores, k, by_position=False)
    taken = scores.topk(min(k, width), dim=-1, sorted=False).indices
    for row, ours, indices in zip(rows, found.tolist(), taken.tolist(), strict=True):
        wanted = sorted(i for i in indices if row[i] > -INF)
        assert [i for i in ours if i >= 0] == wanted
        assert sorted(row[i] for i in wanted) == sorted(row[i] for i in lowest_first(row, k) if i >= 0)
        # Legal ones keep their order; a −1 stands where an illegal one was taken.
        assert len(ours) == k and all(i == -1 or row[i] > -INF for i in ours)


@given(rows=st.lists(st.permutations(list(range(30))), min_size=1, max_size=3), k=st.integers(1, 30))
@settings(max_examples=40)
def test_without_ties_both_rules_agree(rows: list[list[int]], k: int) -> None:
    scores = torch.tensor(rows).float()
    assert torch.equal(
        top_positions(scores, k, by_position=False), top_positions(scores, k, by_position=True)
    )


def test_by_hand() -> None:
    scores = torch.tensor([[3.0, 1.0, 3.0, 3.0, 2.0]])
    assert top_positions(scores, 2, by_position=True).tolist() == [[0, 2]]
    assert top_positions(scores, 4, by_position=True).tolist() == [[0, 2, 3, 4]]
    assert top_positions(scores, 7, by_position=True).tolist() == [[0, 1, 2, 3, 4, -1, -1]]
    nothing = torch.full((1, 5), -INF)
    assert top_positions(nothing, 2, by_position=True).tolist() == [[-1, -1]]
    assert top_positions(nothing, 2, by_position=False).tolist() == [[-1, -1]]


@pytest.mark.parametrize("by_position", [False, True])
def test_no_positions_yet(by_position: bool) -> None:
    assert top_positions(torch.empty(3, 0), 2, by_position=by_position).tolist() == [[-1, -1]] * 3


@pytest.mark.parametrize("by_position", [False, True])
def test_infinite_scores_come_first(by_position: bool) -> None:
    scores = torch.tensor([[0.0, INF, 5.0, INF, -INF]])
    assert top_positions(scores, 2, by_position=by_position).tolist() == [[1, 3]]
    assert sorted(top_positions(scores, 4, by_position=by_position)[0].tolist()) == [0, 1, 2, 3]


@given(visible=st.lists(st.integers(0, 12), min_size=1, max_size=5), k=st.integers(1, 14))
@settings(max_examples=40)
def test_all_visible_is_selection_where_nothing_is_left_out(visible: list[int], k: int) -> None:
    visible = [min(count, k) for count in visible]
    scores = torch.full((len(visible), 12), -INF)
    for row, count in enumerate(visible):
        scores[row, :count] = torch.arange(count) % 3
    wanted = top_positions(scores, k, by_position=True)
    assert torch.equal(all_visible(torch.tensor(visible), k), wanted)


@given(rows=st.lists(st.lists(st.integers(-1, 9), min_size=4, max_size=4), min_size=1, max_size=4))
@settings(max_examples=40)
def test_mask(rows: list[list[int]]) -> None:
    wanted = [[position in row for position in range(10)] for row in rows]
    assert selection_mask(torch.tensor(rows), 10).tolist() == wanted


def test_mask_of_width_zero() -> None:
    assert selection_mask(torch.tensor([[-1, -1]]), 0).shape == (1, 0)


# Candidate blocks


def blocks_by_hand(row: list[float], visible: int, blocks: int, size: int) -> list[int]:
    """The best blocks by their best score, of equals the lower; the latest visible block above all."""
    count = -(-len(row) // size)
    best = [max(row[block * size : (block + 1) * size]) for block in range(count)]
    if visible:
        best[(visible - 1) // size] = INF
    return lowest_first(best, blocks)


@st.composite
def causal_rows(draw: st.DrawFn) -> tuple[list[list[float]], list[int]]:
    """Score rows with −inf from a row's own length on, as the indexer has them."""
    width = draw(st.integers(1, 40))
    visible = draw(st.lists(st.integers(0, width), min_size=1, max_size=4))
    values = st.sampled_from([0.0, 0.0, 1.0, 2.0, -3.0])
    rows = [[draw(values) if at < count else -INF for at in range(width)] for count in visible]
    return rows, visible


@given(rows_and_visible=causal_rows(), blocks=st.integers(1, 8), size=st.integers(1, 6))
@settings(max_examples=150)
def test_chosen_blocks(rows_and_visible: tuple[list[list[float]], list[int]], blocks: int, size: int) -> None:
    rows, visible = rows_and_visible
    chosen = Candidates(blocks, size, by_position=True).choose(torch.tensor(rows), torch.tensor(visible))
    wanted = [blocks_by_hand(row, count, blocks, size) for row, count in zip(rows, visible, strict=True)]
    assert chosen.tolist() == wanted


@pytest.mark.parametrize("by_position", [False, True])
@given(rows_and_visible=causal_rows(), blocks=st.integers(1, 8), size=st.integers(1, 6))
@settings(max_examples=80)
def test_the_latest_block_is_always_kept(
    by_position: bool, rows_and_visible: tuple[list[list[float]], list[int]], blocks: int, size: int
) -> None:
    rows, visible = rows_and_visible
    filter_ = Candidates(blocks, size, by_position)
    scores = torch.tensor(rows)
    chosen = filter_.choose(scores, torch.tensor(visible))
    kept = filter_.keep(scores, chosen)
    for row, count, ids, left in zip(rows, visible, chosen.tolist(), kept.tolist(), strict=True):
        assert len(ids) == blocks
        if count:
            assert (count - 1) // size in ids
        inside = [at // size in ids for at in range(len(row))]
        assert left == [value if allowed else -INF for value, allowed in zip(row, inside, strict=True)]


def test_enough_blocks_filter_nothing() -> None:
    scores = torch.tensor([[3.0, 0.0, -1.0, 2.0, 5.0, -INF, -INF]])
    filter_ = Candidates(3, 3)
    assert torch.equal(filter_.keep(scores, filter_.choose(scores, torch.tensor([5]))), scores)


def test_a_low_latest_block_displaces_a_better_one() -> None:
    scores = torch.tensor([[9.0, 9.0, 8.0, 8.0, 0.0, -INF]])
    chosen = Candidates(2, 2).choose(scores, torch.tensor([5]))
    assert chosen.tolist() == [[0, 2]]
    assert Candidates(2, 2).keep(scores, chosen).tolist() == [[9, 9, -INF, -INF, 0, -INF]]


def test_a_filter_of_another_layers_scores_has_the_same_blocks() -> None:
    """Later indexers keep the source's blocks, whatever their own scores say."""
    filter_ = Candidates(1, 2)
    chosen = filter_.choose(torch.tensor([[0.0, 0.0, 7.0, 7.0]]), torch.tensor([4]))
    later = torch.tensor([[9.0, 9.0, 1.0, 2.0]])
    assert filter_.keep(later, chosen).tolist() == [[-INF, -INF, 1, 2]]
