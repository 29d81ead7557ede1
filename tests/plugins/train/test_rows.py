"""Row functions against the modules of the plain form, and their bfloat16."""

from __future__ import annotations

import pytest
import torch
from vllm_deepinfer_plugins.model import mhc
from vllm_deepinfer_plugins.model.rope import Rotary, rotate
from vllm_deepinfer_plugins.model.tiles import RowTiles
from vllm_deepinfer_plugins.train.forward import Turns
from vllm_deepinfer_plugins.train.rows import (
    Sizes,
    collapse,
    expand,
    expert_parts,
    hyper_parts,
    memory,
    mix,
    mixture,
    turn,
)

from tests.plugins.train.tiny import backbone

MODEL = backbone()
SIZES = Sizes.of(MODEL.config)
STREAMS = torch.randn(9, 4, 32, generator=torch.Generator().manual_seed(0))


def test_mixing_coefficients_and_what_they_mix() -> None:
    mixer = MODEL.layers[3].hc_attn
    pre, post, comb = mix(STREAMS, hyper_parts(mixer), SIZES)
    plain = mixer(STREAMS)
    for ours, theirs in zip((pre.T, post.T, comb.permute(2, 0, 1)), plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(collapse(STREAMS, pre), mhc.collapse(STREAMS, plain[0]))
    output = STREAMS[:, 1] * 2
    torch.testing.assert_close(expand(output, STREAMS, post, comb), mhc.expand(output, STREAMS, *plain[1:]))


@pytest.mark.parametrize("limit", [10.0, 0.5, 0.0])
def test_all_experts_at_once(limit: float) -> None:
    layer = backbone().layers[1].ffn
    layer.experts.limit = layer.shared_experts.limit = limit
    x = STREAMS[:, 2] * 3
    ours, load = mixture(x, expert_parts(layer), SIZES._replace(limit=limit))
    experts, weights = layer.gate(x, None)
    torch.testing.assert_close(ours, layer(x, experts, weights, RowTiles()), atol=1e-5, rtol=1e-4)
    assert load.tolist() == torch.bincount(experts.flatten(), minlength=4).tolist()


def test_the_selection_bias_moves_the_choice_and_not_the_weights() -> None:
    layer = backbone().layers[1].ffn
    x = STREAMS[:, 2]
    with torch.no_grad():
        layer.gate.bias.copy_(torch.tensor([0.0, 100.0, 100.0, 0.0]))
    assert mixture(x, expert_parts(layer), SIZES)[1].tolist() == [0, 9, 9, 0]
    experts, weights = layer.gate(x, None)
    torch.testing.assert_close(
        mixture(x, expert_parts(layer), SIZES)[0],
        layer(x, experts, weights, RowTiles()),
        atol=1e-5,
        rtol=1e-4,
    )


def test_real_rotations_are_the_complex_ones_and_turn_back() -> None:
    turns = Turns.at(Rotary(MODEL.config, compressed=True), torch.arange(9) * 7)
    values = torch.randn(9, 3, 40, generator=torch.Generator().manual_seed(1))
    turned = turn(values, turns.cos, turns.sin)
    torch.testing.assert_close(turned, rotate(values, turns.complex), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(turn(turned, turns.cos, -turns.sin), values, atol=1e-5, rtol=1e-5)


def test_the_memory_read_is_engrams() -> None:
    engram = next(layer.engram for layer in MODEL.layers if layer.engram is not None)
    rows = torch.randint(0, len(engram.embed.weight), (9, 6), generator=torch.Generator().manual_seed(2))
    embedded = engram.embed(rows).flatten(1)
    ours = memory(STREAMS, embedded, engram.wkv.weight, engram.q_weight * engram.k_weight, engram.eps)
    torch.testing.assert_close(ours, engram(STREAMS, rows, None), atol=1e-5, rtol=1e-4)


def test_bfloat16_streams_stay_bfloat16_and_near() -> None:
    mixer, low = MODEL.layers[3].hc_attn, STREAMS.bfloat16()
    parts = mix(low, hyper_parts(mixer), SIZES)
    assert all(part.dtype == torch.float32 for part in parts)
    result = expand(low[:, 1], low, *parts[1:])
    exact = expand(STREAMS[:, 1], STREAMS, *mix(STREAMS, hyper_parts(mixer), SIZES)[1:])
    assert result.dtype == torch.bfloat16 and (result.float() - exact).norm() < 0.02 * exact.norm()
