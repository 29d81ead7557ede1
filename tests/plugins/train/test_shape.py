"""The trained model's shape has every mechanism and fits what it is meant for."""

from __future__ import annotations

import math

import torch
from vllm_deepinfer_plugins.model.mhc import HyperConnection
from vllm_deepinfer_plugins.train.rows import Sizes, hyper_parts, mix
from vllm_deepinfer_plugins.train.shape import OPTIONS, build_backbone, build_drafter, config_fields

from tests.plugins.train.tiny import FIELDS, TOKENIZER, assert_same, weights
from vllm_deepinfer.checkpoint.config import V41Config
from vllm_deepinfer.checkpoint.tensors import entries
from vllm_deepinfer.checkpoint.weights import stored_headers
from vllm_deepinfer.lessons.vocabulary import tokenizer


def test_every_mechanism_and_at_most_6_m_parameters_in_12_mb() -> None:
    config = V41Config.from_dict(config_fields(tokenizer()))
    text = config.text_config
    assert text.compress_ratios[: text.num_hidden_layers] == (0, 0, 2, 2, 1, 1, 1, 1)
    assert len(text.kv_source_layer_ids) >= 2 and len(text.engram_layer_ids) == 2
    assert text.candidate_source_layer_id in text.kv_source_layer_ids
    assert any(plan.uses_candidates for plan in text.schedule())
    assert text.n_routed_experts >= 8 and text.hc_mult == 4
    assert (text.num_nextn_predict_layers, text.dspark_block_size) == (3, 5)
    assert 16 <= text.sliding_window <= 32 and text.vocab_size <= 2048
    assert text.candidate_topk_blocks * text.candidate_block_size >= text.index_topk
    found = dict(entries(config))
    assert sum(math.prod(entry.shape) for entry in found.values()) <= 6_000_000
    headers = [h for name, entry in found.items() for h in stored_headers(name, entry, "bf16").values()]
    assert sum(header.nbytes for header in headers) <= 12_000_000
    assert OPTIONS.encoding == "bf16"


def test_the_seed_makes_the_weights() -> None:
    for build in (
        lambda seed: build_backbone(FIELDS, TOKENIZER, seed),
        lambda seed: build_drafter(FIELDS, seed),
    ):
        first, second = weights(build(0)), weights(build(1))
        assert_same(first, weights(build(0)))
        assert sum(not torch.equal(value, second[name]) for name, value in first.items()) >= 33


def test_at_first_two_heads_add_something_and_streams_stay() -> None:
    model = build_backbone(FIELDS, TOKENIZER, 0)
    assert [bool(layer.attn.wo_b.weight.any()) for layer in model.layers] == [
        layer.plan.index == 0 or (layer.plan.owns_kv and layer.plan.ratio == 1) for layer in model.layers
    ]
    for layer in model.layers:
        assert not layer.ffn.experts.down.any() and not layer.ffn.shared_experts.w2.weight.any()
    mixer = model.layers[0].hc_attn
    assert isinstance(mixer, HyperConnection)
    streams = torch.randn(7, 4, 32, generator=torch.Generator().manual_seed(0))
    pre, post, comb = mix(streams, hyper_parts(mixer), Sizes.of(model.config))
    assert bool((comb.diagonal() > 0.8).all())
    torch.testing.assert_close(comb.sum(0), torch.ones(4, 7), atol=1e-3, rtol=0)
    torch.testing.assert_close(post, torch.ones(4, 7), atol=0.2, rtol=0)
    assert pre.argmax(0).tolist() == [1] * 7, (
        "the first sub-layer's mix is for the second, which reads stream 1"
    )
