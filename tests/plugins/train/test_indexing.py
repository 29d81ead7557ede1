from __future__ import annotations

import torch
from vllm_deepinfer_plugins.model.indexer import index_scores as plain_scores
from vllm_deepinfer_plugins.train.indexing import STRIDE, Selected, Selector, index_scores

from tests.plugins.train.tiny import backbone

LENGTH = 64


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_scores_are_the_plain_ones() -> None:
    queries, weights, keys = random(2, 8, 3, 16), random(2, 8, 3, seed=1), random(2, 5, 16, seed=2)
    ours = index_scores(queries, weights, keys)
    for row in range(2):
        torch.testing.assert_close(ours[row], plain_scores(queries[row], weights[row], keys[row]))


def selected(plan_index: int, *, sparse: bool) -> Selected:
    config = backbone().config
    plan = config.schedule()[plan_index]
    keys = random(1, LENGTH // plan.ratio, 16, seed=3)
    selector = Selector(config, LENGTH, sparse=sparse, first=3)
    return selector.select(plan, random(1, LENGTH, 2, 16), random(1, LENGTH, 2, seed=1).abs(), keys)


def test_dense_sees_what_is_complete() -> None:
    seen = selected(2, sparse=False).seen[0]
    assert seen.sum(-1).tolist() == [(place + 1) // 2 for place in range(LENGTH)]


def test_sparse_sees_the_best_and_no_more() -> None:
    found = selected(2, sparse=True)
    counts = [(place + 1) // 2 for place in range(LENGTH)]
    assert found.seen[0].sum(-1).tolist() == [min(count, 8) for count in counts]
    for place, scores in zip(range(3, LENGTH, STRIDE), found.scores[0], strict=True):
        kept = found.seen[0, place]
        if kept.any() and (~kept[: counts[place]]).any():
            assert scores[kept].min() >= scores[: counts[place]][~kept[: counts[place]]].max()


def test_the_divergence_is_zero_for_the_target_itself_and_positive_else() -> None:
    visible = torch.ones(STRIDE, 6, dtype=torch.bool).tril(2)
    target = torch.rand(1, 1, 6, generator=torch.Generator().manual_seed(4)) * visible[7:8]
    right = Selected(visible.unsqueeze(0), visible, target.clamp_min(1e-30).log(), target, 4)
    assert abs(right.loss(7).item()) < 1e-5
    wrong = Selected(visible.unsqueeze(0), visible, -right.scores, target, 4)
    share, flat = target / target.sum(), (-right.scores).log_softmax(-1)
    expected = (share * (share.log() - flat)).sum()
    torch.testing.assert_close(wrong.loss(7), expected, atol=1e-5, rtol=1e-4)


def test_what_it_watches_is_attention() -> None:
    query, entries = random(1, STRIDE, 2, 8), random(1, 6, 8, seed=5)
    visible = torch.ones(STRIDE, 6, dtype=torch.bool)
    scores = torch.einsum("bshd,bwd->bshw", query, entries) * 8**-0.5
    found = Selected(visible.unsqueeze(0), visible, torch.zeros(1, 1, 6), torch.zeros(1, 1, 6), 0)
    found.watch(query, entries, scores.logsumexp(-1), 5)
    torch.testing.assert_close(found.target[0, 0], scores.softmax(-1)[0, 5].sum(0))
    assert found.shares == 2


def test_rows_that_attend_to_no_entry_count_little() -> None:
    visible = torch.ones(2 * STRIDE, 2, dtype=torch.bool)
    target = torch.tensor([[[2.0, 0.0], [0.0, 1e-6]]])
    scores = torch.tensor([[[0.0, 0.0], [9.0, 0.0]]])
    loss = Selected(visible.unsqueeze(0), visible, scores, target, 2).loss(0)
    first, second = torch.log(torch.tensor(2.0)), -scores[0, 1].log_softmax(-1)[1]
    torch.testing.assert_close(loss, (first + 0.05 * second) / 1.05, atol=1e-3, rtol=1e-3)
