"""Selection against a sort in Python. Whole numbers make scores exact, so ties are common and decided."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_deepinfer_plugins.kernels import Filter, Kernels, Paged
from vllm_deepinfer_plugins.model.indexer import index_scores
from vllm_deepinfer_plugins.model.selection import Candidates, top_positions

from ..samples import integers, noise, paged
from ..variants import threads

SIZE, OFFSET = 32, 16


class Step:
    """Queries and entries of one request; ``keys`` [entries, SIZE] stand behind OFFSET other channels."""

    def __init__(self, tokens: int, heads: int, begin: int, ratio: int, most: int = 1, seed: int = 0) -> None:
        self.begin, self.ratio, self.tokens = begin, ratio, tokens
        width = max((begin + tokens) // ratio, 1)
        self.query = integers(tokens, heads, SIZE, most=most, seed=seed)
        self.weights = integers(tokens, heads, most=2, seed=seed + 1, dtype=torch.float32) / 2
        self.keys = integers(width, SIZE, most=most, seed=seed + 2)
        self.visible = (torch.arange(begin, begin + tokens) + 1) // ratio

    def entries(self) -> Paged:
        others = integers(7, OFFSET + self.keys.shape[1], most=1, seed=9)
        rows = torch.cat((noise(len(self.keys), OFFSET), self.keys), dim=1)
        return paged([others, rows], block=4 * self.ratio, ratio=self.ratio)

    def scores(self) -> torch.Tensor:
        """[tokens, width], −inf beyond what a row may see."""
        scores = index_scores(self.query.double(), self.weights.double(), self.keys).float()
        return scores.masked_fill(torch.arange(len(self.keys)) >= self.visible.unsqueeze(1), -torch.inf)

    def rows(self, kernels: Kernels, k: int, candidates: Filter | None = None) -> torch.Tensor:
        request = torch.ones(self.tokens, dtype=torch.int64)
        return kernels.select_rows(
            self.query, self.weights, request, self.visible, self.entries(), OFFSET, candidates, k
        )

    def span(self, kernels: Kernels, k: int, candidates: Filter | None = None) -> torch.Tensor:
        return kernels.select_span(
            self.query, self.weights, self.begin, 1, self.entries(), OFFSET, candidates, k
        )


def best(scores: torch.Tensor, k: int) -> torch.Tensor:
    """By a sort: higher scores first, of equal ones the lower position; increasing, then −1."""
    result = []
    for row in scores.tolist():
        seen = [at for at, score in enumerate(row) if score > float("-inf")]
        taken = sorted(sorted(seen, key=lambda at: (-row[at], at))[:k])
        result.append(taken + [-1] * (k - len(taken)))
    return torch.tensor(result).reshape(len(scores), k)


@pytest.mark.parametrize("heads", [1, 4, 5, 8, 32, 33, 64])
@pytest.mark.parametrize(
    ("tokens", "begin", "ratio", "k"),
    [
        (1, 0, 1, 4),
        (1, 0, 2, 4),
        (7, 0, 2, 3),
        (33, 5, 1, 8),
        (9, 120, 1, 16),
        (40, 257, 2, 64),
        (3, 31, 1, 100),
    ],
)
def test_the_best_entries(kernels: Kernels, heads: int, tokens: int, begin: int, ratio: int, k: int) -> None:
    step = Step(tokens, heads, begin, ratio)
    wanted = best(step.scores(), k)
    assert torch.equal(top_positions(step.scores(), k, by_position=True), wanted), "the portable rule"
    assert torch.equal(step.rows(kernels, k), wanted)
    assert torch.equal(step.span(kernels, k), wanted)


@given(
    tokens=st.integers(1, 12),
    heads=st.integers(1, 9),
    begin=st.integers(0, 90),
    ratio=st.sampled_from([1, 2, 4]),
    k=st.integers(1, 40),
    most=st.integers(0, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_any_step(
    kernels: Kernels, tokens: int, heads: int, begin: int, ratio: int, k: int, most: int, seed: int
) -> None:
    step = Step(tokens, heads, begin, ratio, most, seed)
    wanted = best(step.scores(), k)
    assert torch.equal(step.rows(kernels, k), wanted) and torch.equal(step.span(kernels, k), wanted)


def test_scores_over_the_whole_range_of_floats(kernels: Kernels) -> None:
    """Every bin of the radix selection: one head, keys of one channel from 1e-30 to 1e30, both signs."""
    step = Step(1, 1, 599, 1)
    step.query[:], step.keys[:] = 0, 0
    step.query[0, 0, 0] = 1
    step.keys[:, 0] = torch.logspace(-30, 30, 600)[torch.randperm(600)].bfloat16()
    for weight in (1.0, -1.0):
        step.weights[:] = weight
        for k in (1, 17, 599):
            wanted = best(step.scores(), k)
            assert torch.equal(step.rows(kernels, k), wanted) and torch.equal(step.span(kernels, k), wanted)


@pytest.mark.parametrize("begin", [0, 13, 64])
@pytest.mark.parametrize(("blocks", "size"), [(1, 4), (3, 4), (2, 8), (5, 1), (40, 4)])
def test_a_source_fills_the_candidates(kernels: Kernels, blocks: int, size: int, begin: int) -> None:
    step = Step(20, 4, begin, 1)
    wanted = Candidates(blocks, size, by_position=True).choose(step.scores(), step.visible)
    for call in (step.rows, step.span):
        filled = torch.full((20, blocks), 77)
        assert torch.equal(call(kernels, 8, Filter(filled, size, True)), best(step.scores(), 8))
        assert torch.equal(filled, wanted)
        latest = (step.visible - 1) // size
        assert (filled == latest.unsqueeze(1)).any(1).all()


@pytest.mark.parametrize("begin", [0, 13, 64])
@pytest.mark.parametrize(("blocks", "size"), [(1, 4), (3, 4), (2, 8), (5, 1)])
def test_a_follower_keeps_inside_them(kernels: Kernels, blocks: int, size: int, begin: int) -> None:
    step, rule = Step(20, 5, begin, 1), Candidates(blocks, size, by_position=True)
    kept = rule.choose(Step(20, 5, begin, 1, seed=50).scores(), step.visible).contiguous()
    wanted = best(rule.keep(step.scores(), kept), 8)
    for call in (step.rows, step.span):
        before = kept.clone()
        assert torch.equal(call(kernels, 8, Filter(kept, size, False)), wanted)
        assert torch.equal(kept, before), "a follower writes nothing"


def test_candidates_out_of_range_are_none(kernels: Kernels) -> None:
    step = Step(3, 4, 10, 1)
    nowhere = torch.tensor([[-1, 500], [2**40, -7], [0, 99]])
    wanted = best(step.scores(), 4)
    wanted[:2] = -1
    wanted[2] = best(step.scores()[2:].masked_fill(torch.arange(13) >= 4, -torch.inf), 4)[0]
    for call in (step.rows, step.span):
        assert torch.equal(call(kernels, 4, Filter(nowhere.clone(), 4, False)), wanted)


def test_rows_of_several_requests(kernels: Kernels) -> None:
    keys = [integers(count, SIZE, most=1, seed=count) for count in (9, 1, 30)]
    entries = paged([torch.cat((noise(len(part), OFFSET), part), dim=1) for part in keys], block=8, ratio=2)
    requests = torch.tensor([2, 0, 1, 2, 0])
    visible = torch.tensor([30, 9, 1, 4, 0])
    query = integers(5, 4, SIZE, most=1)
    weights = integers(5, 4, most=2, seed=1, dtype=torch.float32)
    found = kernels.select_rows(query, weights, requests, visible, entries, OFFSET, None, 5)
    for row in range(5):
        own = keys[int(requests[row])][: int(visible[row])]
        scores = index_scores(query[row : row + 1].double(), weights[row : row + 1].double(), own)
        assert torch.equal(found[row : row + 1], best(scores, 5))
    assert found[4].tolist() == [-1] * 5, "nothing to see"


@pytest.mark.parametrize("heads", [4, 5, 40])
def test_a_row_has_the_same_bits_in_any_company(kernels: Kernels, heads: int) -> None:
    """With real scores; a chunk cut anywhere chooses the same."""
    step = Step(40, heads, 90, 1)
    step.query, step.weights = noise(40, heads, SIZE), noise(40, heads, dtype=torch.float32, seed=1)
    step.keys = noise(130, SIZE, seed=2)
    entries, requests = step.entries(), torch.ones(40, dtype=torch.int64)
    whole = step.rows(kernels, 20)
    for rows in ([0], [39], [7, 7, 30, 2]):
        alone = kernels.select_rows(
            step.query[rows],
            step.weights[rows],
            requests[rows],
            step.visible[rows],
            entries,
            OFFSET,
            None,
            20,
        )
        assert torch.equal(alone, whole[rows])
    span = step.span(kernels, 20)
    for cut in (1, 13, 39):
        parts = [
            kernels.select_span(
                step.query[part], step.weights[part], 90 + part.start, 1, entries, OFFSET, None, 20
            )
            for part in (slice(0, cut), slice(cut, 40))
        ]
        assert torch.equal(torch.cat(parts), span)
    with threads(2):
        assert torch.equal(step.rows(kernels, 20), whole) and torch.equal(step.span(kernels, 20), span)


@pytest.mark.parametrize("poison", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["query", "weights", "keys"])
@pytest.mark.parametrize("source", [None, True, False])
def test_poison_stays_in_bounds(kernels: Kernels, where: str, poison: float, source: bool | None) -> None:
    step = Step(9, 4, 30, 1)
    array: torch.Tensor = getattr(step, where)
    array[2], array[8] = poison, -poison
    for call in (step.rows, step.span):
        blocks = torch.zeros(9, 3, dtype=torch.int64)
        found = call(kernels, 6, None if source is None else Filter(blocks, 4, source))
        assert ((found >= -1) & (found < step.visible.unsqueeze(1))).all()
        assert ((blocks >= -1) & (blocks * 4 < step.visible.unsqueeze(1))).all()
        for row in found.tolist():
            taken = [at for at in row if at >= 0]
            assert taken == sorted(set(taken)) and row[len(taken) :] == [-1] * (6 - len(taken))


def test_no_rows(kernels: Kernels) -> None:
    step = Step(1, 4, 0, 4)
    assert step.rows(kernels, 3).tolist() == step.span(kernels, 3).tolist() == [[-1, -1, -1]]
    empty = torch.empty(0, dtype=torch.int64)
    found = kernels.select_rows(
        step.query[:0], step.weights[:0], empty, empty, step.entries(), OFFSET, None, 3
    )
    assert found.shape == (0, 3)
