"""The plain form of replay against the rule by the letter."""

from __future__ import annotations

import pytest
import torch
from vllm_deepinfer_plugins.bench.quality.replayed import Cut, replayed
from vllm_deepinfer_plugins.model.weights import load_backbone

from tests.plugins.model.literal import literal
from tests.plugins.model.samples import tiny, token_ids

LENGTH, HIT, WINDOW = 96, 48, 16
IDS = token_ids(LENGTH)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Four layers whose selection leaves nothing out: ties between equal scores are another test's matter."""
    folder = tiny(
        tmp_path_factory.mktemp("replayed"),
        ratios=(0, 2, 1, 1),
        kv_sources=(1, 2),
        index_sources=(1, 2, 3),
        engram_layers=(1,),
        experts=4,
        heads=2,
        overrides={"index_topk": 128, "candidate_topk_blocks": 64},
    )
    return load_backbone(folder)


def letter(model: object, cut: Cut, cached: dict[int, torch.Tensor]) -> torch.Tensor:
    hidden, _ = literal(model, IDS, start=cut.start, hit=cut.hit, kept=cut.kept, cached=cached)
    logits: torch.Tensor = model.logits(hidden)  # type: ignore[attr-defined]
    return logits


@torch.no_grad()
def test_without_a_cut_it_is_the_whole_form(model: object) -> None:
    logits, entries = replayed(model, IDS, Cut(), {})  # type: ignore[arg-type]
    assert torch.equal(logits, model.whole(IDS.unsqueeze(0))[0])  # type: ignore[attr-defined]
    assert {layer: tuple(rows.shape[:2]) for layer, rows in entries.items()} == {1: (1, 48), 2: (1, 96)}


@pytest.mark.parametrize(
    "cut",
    [
        Cut(HIT - WINDOW, HIT),
        Cut(kept=HIT - WINDOW - 12),
        Cut(HIT - WINDOW, HIT, HIT - 4),
        Cut(0, 0, LENGTH - 1),
    ],
)
@torch.no_grad()
def test_the_rule_by_the_letter(model: object, cut: Cut) -> None:
    _, entries = replayed(model, IDS, Cut(), {})  # type: ignore[arg-type]
    _, cached = literal(model, IDS)
    found, _ = replayed(model, IDS, cut, entries)  # type: ignore[arg-type]
    rows = slice(max(cut.kept, cut.hit) - cut.start, None)
    assert torch.allclose(found[rows], letter(model, cut, cached)[rows], atol=2e-4, rtol=1e-4)
    whole = model.whole(IDS.unsqueeze(0))[0][cut.start :][rows]  # type: ignore[attr-defined]
    assert not torch.allclose(found[rows], whole, atol=1e-2)  # a cut that changed nothing would prove nothing


@torch.no_grad()
def test_entries_in_front_of_a_hit_are_adopted(model: object) -> None:
    _, entries = replayed(model, IDS, Cut(), {})  # type: ignore[arg-type]
    _, after = replayed(model, IDS, Cut(HIT - WINDOW, HIT), entries)  # type: ignore[arg-type]
    for layer, ratio in ((1, 2), (2, 1)):
        assert torch.equal(after[layer][:, : HIT // ratio], entries[layer][:, : HIT // ratio])
        assert after[layer].shape == entries[layer].shape
