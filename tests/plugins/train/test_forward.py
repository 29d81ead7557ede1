"""The training pass is the plain form: logits, gradients and the drafter's taps."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from vllm_deepinfer_plugins.draft.whole import features_of
from vllm_deepinfer_plugins.kernels import load, suspended
from vllm_deepinfer_plugins.train.forward import Pass

from tests.plugins.train.tiny import backbone

IDS = torch.randint(10, 500, (2, 96), generator=torch.Generator().manual_seed(1))


def close(first: torch.Tensor, second: torch.Tensor) -> None:
    """Most rows to rounding; a sum in another order may move a cached value into the next FP4 bin."""
    difference = (first - second).abs().flatten(0, -2).amax(-1)
    assert difference.median() < 1e-4
    assert (difference < 0.05 * second.abs().max()).float().mean() > 0.97


def test_logits_with_selection_and_candidates_are_the_plain_forms() -> None:
    model = backbone()
    with torch.no_grad():
        hidden = Pass(model, IDS, torch.float32, sparse=True).run().hidden
        close(model.logits(hidden).unflatten(0, IDS.shape), model.whole(IDS))


def test_dense_attention_is_the_plain_form_with_a_top_k_of_everything() -> None:
    model = backbone()
    with torch.no_grad():
        dense = Pass(model, IDS, torch.float32, sparse=False).run().hidden
        sparse = Pass(model, IDS, torch.float32, sparse=True).run().hidden
        model.config = model.config.model_copy(update={"index_topk": 96, "candidate_topk_blocks": 96})
        close(model.logits(dense).unflatten(0, IDS.shape), model.whole(IDS))
    first = slice(0, 8)  # as many entries as the selection keeps
    assert torch.equal(dense.unflatten(0, IDS.shape)[:, first], sparse.unflatten(0, IDS.shape)[:, first])
    assert not torch.allclose(dense, sparse, atol=1e-3)


def test_gradients_of_the_token_loss_are_the_plain_forms() -> None:
    model = backbone().requires_grad_(True)
    named = [(name, value) for name, value in model.named_parameters() if "bias" not in name]
    losses = (
        model.logits(Pass(model, IDS, torch.float32, sparse=True).run().hidden),
        model.whole(IDS).flatten(0, 1),
    )
    gradients = [
        torch.autograd.grad(
            F.cross_entropy(logits[:-1], IDS.flatten()[1:]), [value for _, value in named], allow_unused=True
        )
        for logits in losses
    ]
    compared = 0
    for (name, _), ours, plain in zip(named, *gradients, strict=True):
        if "indexer" in name and "wk" not in name and "k_norm" not in name:
            assert ours is None, f"{name}: the indexer learns from its own loss alone"
            continue
        if ours is None or plain is None:
            assert ours is plain, name
            continue
        assert (ours - plain).norm() < 0.05 * plain.norm() + 1e-7, name
        compared += 1
    assert compared > 150


def test_the_indexer_learns_from_the_divergence_and_nothing_else_does() -> None:
    model = backbone().requires_grad_(True)
    passed = Pass(model, IDS, torch.float32, sparse=True).run()
    assert len(passed.divergences) == 3 and all(loss > 0 for loss in passed.divergences)
    named = [(name, value) for name, value in model.named_parameters() if "bias" not in name]
    gradients = torch.autograd.grad(sum(passed.divergences), [value for _, value in named], allow_unused=True)
    learning = {
        name
        for (name, _), gradient in zip(named, gradients, strict=True)
        if gradient is not None and bool(gradient.any())
    }
    assert learning == {name for name, _ in named if ".indexer." in name}


def test_taps_and_loads() -> None:
    model = backbone()
    with torch.no_grad():
        passed = Pass(model, IDS, torch.float32, sparse=True, taps=(5, 6, 7)).run()
        plain = torch.stack([features_of(model, row, (5, 6, 7)) for row in IDS])
    close(torch.cat(passed.taps, -1), plain.flatten(0, 1))
    assert [float(load.sum()) for load in passed.loads] == [IDS.numel() * 2.0] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_see_what_comes_after(dtype: torch.dtype) -> None:
    model, changed = backbone(), IDS.clone()
    changed[:, 64:] = 7
    with torch.no_grad():
        passed = [Pass(model, ids, dtype, sparse=True).run().hidden for ids in (IDS, changed)]
    first, second = (hidden.unflatten(0, IDS.shape) for hidden in passed)
    assert torch.equal(first[:, :64], second[:, :64]) and not torch.equal(first[:, 64:], second[:, 64:])


def test_an_engines_kernels_in_the_process_change_nothing() -> None:
    model = backbone()
    with torch.no_grad(), suspended():
        plain = Pass(model, IDS, torch.bfloat16, sparse=True).run().hidden
        load()  # as an engine in this process does
        beside = Pass(model, IDS, torch.bfloat16, sparse=True).run().hidden
    assert torch.equal(plain, beside)
