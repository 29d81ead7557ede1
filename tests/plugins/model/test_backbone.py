"""The whole language model: names, gradients, image positions, dtypes."""

from __future__ import annotations

import pytest
import torch
from vllm_deepinfer_plugins.model.backbone import Backbone
from vllm_deepinfer_plugins.model.whole import WholeSequences

from vllm_deepinfer.checkpoint.layout import expected_tensors

from .engines import NAMES
from .samples import assert_parity, backbone, divergence, text_config, token_ids, variant


def test_parameters_have_the_released_names() -> None:
    released = {
        name
        for name in expected_tensors(text_config(), encoding="fp32")
        if ".experts." not in name or "shared_experts" in name
    }
    ours = {name for name, _ in variant().named_parameters()}
    stacked = {name for name in ours if name.endswith(("experts.gate_up", "experts.down"))}
    renamed = {name.replace(".hc_attn_", ".hc_attn.").replace(".hc_ffn_", ".hc_ffn.") for name in released}
    assert ours - stacked == renamed
    assert len(stacked) == 2 * 8


def test_parameter_count() -> None:
    sizes = [spec.shape for spec in expected_tensors(text_config(), encoding="fp32").values()]
    assert sum(p.numel() for p in variant().parameters()) == sum(torch.Size(shape).numel() for shape in sizes)


def test_gradients_reach_every_trainable_parameter() -> None:
    """Except the indexer's: its scores choose, and a choice has no gradient."""
    model = variant()
    ids = torch.stack((token_ids(60, seed=1), token_ids(60, seed=2)))
    loss = torch.nn.functional.cross_entropy(model.whole(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            assert parameter.grad is None or not parameter.grad.any(), name
        elif name.endswith(("gate.bias", "gate.bias_vl")):
            assert not parameter.requires_grad and parameter.grad is None, name
        else:
            assert parameter.grad is not None and float(parameter.grad.abs().sum()) > 0, name
            assert torch.isfinite(parameter.grad).all(), name


def test_a_step_of_training_lowers_the_loss() -> None:
    model, ids = variant(), token_ids(40).unsqueeze(0)
    optimiser = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.02)
    losses = []
    for _ in range(4):
        loss = torch.nn.functional.cross_entropy(model.whole(ids)[0, :-1], ids[0, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05


def test_training_and_inference_compute_the_same() -> None:
    model, ids = backbone(), token_ids(90).unsqueeze(0)
    with torch.no_grad():
        wanted = model.whole(ids)
    torch.testing.assert_close(model.whole(ids).detach(), wanted, rtol=1e-4, atol=2e-4)


@torch.no_grad()
def test_hidden_states_and_head() -> None:
    model, ids = backbone(), token_ids(20)
    hidden = model(ids, WholeSequences(model.config, 1, 20, ids.device))
    assert hidden.shape == (20, 64)
    logits = model.logits(hidden)
    torch.testing.assert_close(logits, hidden @ model.head.weight.T)
    assert torch.equal(logits, model.whole(ids.unsqueeze(0))[0])


@torch.no_grad()
def test_bfloat16_stays_near_float32() -> None:
    """Near, not equal: a rounding moves values to the next code of a cache."""
    model, ids = backbone(NAMES[0], torch.bfloat16), token_ids(50).unsqueeze(0)
    logits = model.whole(ids)[0]
    assert logits.dtype == torch.float32
    kept = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    exact = ("head.weight", "layers.0.attn.attn_sink", "layers.0.ffn.gate.weight", "layers.0.hc_attn.fn")
    assert kept.issuperset(exact)
    assert not any("experts." in name or "wq_a" in name for name in kept)
    wanted = backbone().whole(ids)[0]
    assert float(divergence(wanted, logits).mean()) < 0.7
    assert float(torch.cosine_similarity(logits, wanted).mean()) > 0.97
    assert float((logits.argmax(-1) == wanted.argmax(-1)).float().mean()) > 0.6


@torch.no_grad()
def test_image_positions_block_ngrams_and_route_by_their_own_bias() -> None:
    model, ids = variant(), token_ids(30).unsqueeze(0)
    image = torch.zeros(1, 30, dtype=torch.bool)
    text = model.whole(ids)
    assert torch.equal(model.whole(ids, image), text), "no image positions is no image"
    image[0, 12:15] = True
    mixed = model.whole(ids, image)
    assert_parity(text[0, :12], mixed[0, :12])
    assert not torch.isclose(mixed[:, 12:], text[:, 12:]).all()
    for layer in model.layers:
        layer.ffn.gate.bias_vl.data += torch.tensor([9.0, 0, 0, 0, 0, 0, 0, 9.0])
    assert not torch.isclose(model.whole(ids, image)[:, 12:15], mixed[:, 12:15]).all()
    assert torch.equal(model.whole(ids), text)


@torch.no_grad()
def test_an_images_ids_do_not_reach_engram() -> None:
    """No n-gram looks at an image position: where embeddings are equal, ids there make no difference."""
    model, ids = variant(), token_ids(30).unsqueeze(0)
    image = torch.zeros(1, 30, dtype=torch.bool)
    image[0, 12:15] = True
    other = ids.clone()
    other[0, 12:15] = torch.tensor([400, 401, 402])
    model.embed.weight.data[ids[0, 12:15]] = model.embed.weight.data[400:403].clone()
    assert torch.equal(model.whole(ids, image)[:, 12:], model.whole(other, image)[:, 12:])
    assert not torch.equal(model.whole(ids)[:, 12:], model.whole(other)[:, 12:])


def test_engram_needs_the_tokenizers_hash() -> None:
    with pytest.raises(ValueError, match=r"engram_layer_ids is not empty.*EngramHash"):
        Backbone(text_config(), None)


@torch.no_grad()
def test_without_engram_no_hash_is_needed() -> None:
    torch.manual_seed(0)
    model = Backbone(text_config(engram_layer_ids=[], engram_num_embeddings=[]), None)
    assert model.ngrams is None
    assert torch.isfinite(model.whole(token_ids(20).unsqueeze(0))).all()
