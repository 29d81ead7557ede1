"""Attention with a sink, gathered and dense, against a loop over queries; projections against formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_deepinfer_plugins.model.attention import Attention, dense_attention, sink_attention
from vllm_deepinfer_plugins.model.quant import quantize_cache
from vllm_deepinfer_plugins.model.rope import Rotary, rotate

from .samples import noise, text_config

DTYPES = [torch.float32, torch.bfloat16]
PRECISE = {torch.float32: {"rtol": 1e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 2**-6, "atol": 2e-2}}


def by_hand(query: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """Softmax over the seen keys and one more logit, the sink, that has no value; in Python floats."""
    output = torch.zeros(query.shape, dtype=torch.float64)
    for token in range(len(query)):
        for head in range(query.shape[1]):
            slots = seen[token].nonzero().flatten().tolist()
            row = query[token, head].double()
            logits = [float(row @ keys[token, slot].double()) / math.sqrt(len(row)) for slot in slots]
            largest = max([*logits, sink[head].item()])
            powers = [math.exp(logit - largest) for logit in logits]
            total = sum(powers) + math.exp(sink[head].item() - largest)
            for slot, power in zip(slots, powers, strict=True):
                output[token, head] += power / total * keys[token, slot].double()
    return output


@pytest.fixture(params=[False, True], ids=["inference", "training"], autouse=True)
def grad(request: pytest.FixtureRequest) -> object:
    with torch.set_grad_enabled(request.param):
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "slots"), [(1, 1, 1), (1, 4, 7), (3, 4, 20), (5, 2, 33), (40, 3, 5)]
)
def test_gathered_and_dense_against_a_loop(tokens: int, heads: int, slots: int, dtype: torch.dtype) -> None:
    query, keys = noise(tokens, heads, 32, dtype=dtype) * 2, noise(slots, 32, seed=1).bfloat16()
    sink = noise(heads, seed=2)
    seen = torch.rand(tokens, slots, generator=torch.Generator().manual_seed(3)) < 0.6
    wanted = by_hand(query, keys.expand(tokens, -1, -1), seen, sink)
    for found in (
        sink_attention(query, keys.expand(tokens, -1, -1), seen, sink),
        dense_attention(query, keys, seen, sink),
    ):
        assert (found.dtype, found.shape) == (dtype, query.shape)
        torch.testing.assert_close(found.double(), wanted, **PRECISE[dtype])


@given(tokens=st.integers(1, 6), slots=st.integers(1, 20), heads=st.integers(1, 3), seed=st.integers(0, 9))
@settings(max_examples=15)
def test_keys_of_ones_own(tokens: int, slots: int, heads: int, seed: int) -> None:
    query, keys = noise(tokens, heads, 16, seed=seed), noise(tokens, slots, 16, seed=seed + 1)
    seen = torch.rand(tokens, slots, generator=torch.Generator().manual_seed(seed)) < 0.5
    sink = noise(heads, seed=seed + 2)
    found = sink_attention(query, keys, seen, sink)
    torch.testing.assert_close(found.double(), by_hand(query, keys, seen, sink), **PRECISE[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_sees_nothing_is_zero(dtype: torch.dtype) -> None:
    """All weight goes to the sink, which has no value; other rows are none the worse."""
    query, keys, sink = noise(3, 4, 32, dtype=dtype), noise(6, 32, seed=1, dtype=dtype), noise(4, seed=2)
    seen = torch.tensor([[True] * 6, [False] * 6, [False, True] * 3])
    for attend in (
        lambda: dense_attention(query, keys, seen, sink),
        lambda: sink_attention(query, keys.expand(3, -1, -1), seen, sink),
    ):
        found = attend()
        assert torch.isfinite(found).all()
        assert torch.equal(found[1], torch.zeros(4, 32, dtype=dtype))
        wanted = by_hand(query, keys.expand(3, -1, -1), seen, sink)
        torch.testing.assert_close(found.double(), wanted, **PRECISE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_unseen_keys_do_not_count(dtype: torch.dtype) -> None:
    query, keys, sink = noise(2, 4, 32, dtype=dtype), noise(6, 32, seed=1, dtype=dtype), noise(4, seed=2)
    seen = torch.tensor([[True, False, True, True, False, True]] * 2)
    other = keys.clone()
    other[[1, 4]] = 1000
    assert torch.equal(dense_attention(query, keys, seen, sink), dense_attention(query, other, seen, sink))
    gathered = [sink_attention(query, k.expand(2, -1, -1), seen, sink) for k in (keys, other)]
    assert torch.equal(*gathered)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [-1e4, 1e4])
def test_extreme_sinks(size: float, dtype: torch.dtype) -> None:
    """A sink far below all logits is no sink; one far above takes everything."""
    query, keys = noise(2, 4, 32, dtype=dtype), noise(5, 32, seed=1, dtype=dtype)
    seen, sink = torch.ones(2, 5).bool(), torch.full((4,), size)
    wanted = by_hand(query, keys.expand(2, -1, -1), seen, sink)
    assert float(wanted.abs().max()) > 0.1 if size < 0 else not wanted.any()
    for found in (
        dense_attention(query, keys, seen, sink),
        sink_attention(query, keys.expand(2, -1, -1), seen, sink),
    ):
        torch.testing.assert_close(found.double(), wanted, **PRECISE[dtype])


def test_large_logits_do_not_overflow() -> None:
    query, keys = torch.full((1, 1, 16), 1e3), torch.full((2, 16), 1e3)
    keys[1] = -1e3
    seen, sink = torch.ones(1, 2).bool(), torch.zeros(1)
    assert dense_attention(query, keys, seen, sink).tolist() == [[[1e3] * 16]]
    assert sink_attention(query, keys.unsqueeze(0), seen, sink).tolist() == [[[1e3] * 16]]


def attention(layer: int, dtype: torch.dtype = torch.float32) -> Attention:
    config = text_config()
    torch.manual_seed(layer)
    return Attention(config, config.schedule()[layer], dtype)


@pytest.mark.parametrize(
    ("layer", "parts"), [(0, set()), (2, {"compressor", "indexer"}), (3, set()), (6, {"indexer"})]
)
def test_what_a_layer_owns(layer: int, parts: set[str]) -> None:
    module = attention(layer)
    assert {part for part in ("compressor", "indexer") if getattr(module, part) is not None} == parts
    projected = module.project(noise(3, 64), Rotary(text_config(), compressed=layer > 1)(torch.arange(3)))
    assert (projected.raw is not None) == ("compressor" in parts)
    assert (projected.index_query is not None) == (projected.index_weight is not None) == ("indexer" in parts)


def test_projections_against_the_formulas() -> None:
    module, x = attention(0), noise(5, 64)
    rotations = Rotary(text_config(), compressed=False)(torch.arange(5) * 3)
    projected = module.project(x, rotations)
    latent = module.q_norm(x @ module.wq_a.weight.T)
    query = rotate((latent @ module.wq_b.weight.T).unflatten(1, (4, 32)), rotations)
    torch.testing.assert_close(projected.query, query)
    window = rotate(module.kv_norm(x @ module.wkv.weight.T), rotations)
    assert torch.equal(quantize_cache(projected.window, "fp8"), projected.window)
    torch.testing.assert_close(projected.window, window, rtol=2**-4, atol=2**-7)


def test_queries_have_no_norm_of_their_own() -> None:
    module, x = attention(0), noise(1, 64)
    rotations = Rotary(text_config(), compressed=False)(torch.zeros(1))
    before = module.project(x, rotations).query
    module.wq_b.weight.data *= 2
    torch.testing.assert_close(module.project(x, rotations).query, 2 * before)


def test_the_output_turns_back_and_projects_by_groups() -> None:
    """At its own position a value comes out as it went in: what is left of the rotation is the distance."""
    module, values = attention(0), noise(3, 4, 32)
    rotations = Rotary(text_config(), compressed=False)(torch.tensor([0, 5, 900]))
    plain = module.wo_b(module.wo_a(values.flatten(1)))
    torch.testing.assert_close(
        module.output(rotate(values, rotations), rotations), plain, rtol=1e-4, atol=1e-5
    )


def test_an_entry_is_compressed_kv_beside_its_index_key() -> None:
    module, x = attention(2), noise(4, 64)
    rotary = Rotary(text_config(), compressed=True)
    raw = module.project(x, rotary(torch.arange(4))).raw
    assert raw is not None and module.compressor is not None and module.indexer is not None
    first = rotary(torch.tensor([0, 2]))
    entry = module.entry(raw.unflatten(0, (2, 2)), first)
    latent = module.compressor.pool(raw.unflatten(0, (2, 2)))
    assert entry.shape == (2, 64)
    assert torch.equal(entry[:, :32], quantize_cache(rotate(latent, first), "nvfp4"))
    assert torch.equal(entry[:, 32:], module.indexer.keys(latent, first))
