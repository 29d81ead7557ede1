"""What a backbone can do before it has learnt anything: say what came behind an earlier occurrence."""

from __future__ import annotations

import pytest
import torch
from vllm_deepinfer_plugins.model.backbone import Backbone
from vllm_deepinfer_plugins.train.forward import Pass
from vllm_deepinfer_plugins.train.shape import OPTIONS, build_backbone, config_fields

from vllm_deepinfer.lessons.vocabulary import tokenizer


@pytest.fixture(scope="module")
def fresh() -> Backbone:
    words = tokenizer()
    return build_backbone(config_fields(words, OPTIONS), words, 5)


def hits(model: Backbone, ids: torch.Tensor, asked: torch.Tensor) -> float:
    """Share of tokens behind the places ``asked`` that are the likeliest."""
    with torch.no_grad():
        hidden = Pass(model, ids.unsqueeze(0), torch.float32, sparse=False).run().hidden
        found = model.logits(hidden).argmax(-1)
    return float((found[asked] == ids[asked + 1]).float().mean())


@pytest.mark.parametrize("distance", [48, 96, 192])
def test_a_text_that_is_said_again(fresh: Backbone, distance: int) -> None:
    once = torch.randperm(1700, generator=torch.Generator().manual_seed(distance))[:distance] + 300
    ids = torch.cat((once, once))[: 2 * distance // 32 * 32]
    again = torch.arange(distance, len(ids) - 1)
    assert hits(fresh, ids, again) > 0.5
    assert hits(fresh, ids, again - distance) < 0.05, "what was never said is not known"


def test_keys_with_values_in_another_order(fresh: Backbone) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randperm(1700, generator=generator) + 300).split(850)
    pairs = torch.stack((keys[:64], values[:64]), dim=1)
    ids = torch.cat((pairs.flatten(), pairs[torch.randperm(64, generator=generator)].flatten()))
    assert hits(fresh, ids, torch.arange(128, 256, 2)) > 0.5


def test_the_layer_that_asks_reads_window_keys_and_entries_alike(fresh: Backbone) -> None:
    for layer in fresh.layers:
        if layer.plan.kv_source is not None:
            compressor = fresh.layers[layer.plan.kv_source].attn.compressor
            assert compressor is not None and torch.equal(layer.attn.wkv.weight, compressor.wkv.weight)


def test_no_token_predicts_itself(fresh: Backbone) -> None:
    """The head is the embedding, turned."""
    channels = slice(0, OPTIONS.hidden * 3 // 5)
    embedding, head = (value.weight.detach()[:, channels] for value in (fresh.embed, fresh.head))
    scale = head.std() / embedding.std()
    torch.testing.assert_close(head @ head.T, embedding @ embedding.T * scale**2, atol=1e-3, rtol=1e-3)
    own = (head * embedding).sum(1).mean() / (head.norm(dim=1) * embedding.norm(dim=1)).mean()
    assert abs(float(own)) < 0.1
