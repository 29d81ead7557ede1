"""Engram: rows against the checkpoint package's hash, which is numpy; the gate against its formula."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from vllm_deepinfer_plugins.model.engram import Engram, NgramRows

from vllm_deepinfer.checkpoint.engram import EngramHash

from .engines import FIXTURES, NAMES
from .samples import noise, text_config

TWO_TABLES = {"engram_layer_ids": [1, 3], "engram_num_embeddings": [4096, 4096], "engram_max_ngram_size": 4}


@cache
def hashes(two: bool = False) -> EngramHash:
    tokenizer = Tokenizer.from_file(str(FIXTURES / NAMES[0] / "tokenizer.json"))
    return EngramHash.build(text_config(**(TWO_TABLES if two else {})), tokenizer)


def histories(ids: list[int], dead: list[bool], depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's last ``depth`` ids and which are known, built one token at a time."""
    rows, known = [], []
    for at in range(len(ids)):
        places = range(at - depth + 1, at + 1)
        rows.append([ids[place] if place >= 0 else 77 for place in places])
        known.append([place >= 0 and not dead[place] for place in places])
    return torch.tensor(rows), torch.tensor(known)


@pytest.mark.parametrize("two", [False, True])
@given(data=st.data(), length=st.integers(1, 40))
@settings(max_examples=30)
def test_rows_of_the_reference_hash(two: bool, data: st.DataObject, length: int) -> None:
    """Image positions (dead) block n-grams, at themselves and for every token that would look past them."""
    ids = data.draw(st.lists(st.integers(0, 511), min_size=length, max_size=length))
    dead = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
    reference = hashes(two)
    ngrams = NgramRows(reference)
    found = ngrams(*histories(ids, dead, ngrams.depth))
    wanted = torch.from_numpy(reference.rows(torch.tensor(ids).numpy(), dead=torch.tensor(dead).numpy()))
    assert torch.equal(found, wanted)


def test_depth_and_shapes() -> None:
    one, two = NgramRows(hashes()), NgramRows(hashes(two=True))
    assert (one.depth, two.depth) == (3, 4)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert two(ids, torch.ones_like(ids).bool()).shape == (1, 2, 3 * 2)
    assert one(ids[:, 1:], torch.ones(1, 3).bool()).shape == (1, 1, 2 * 2)


def test_rows_lie_in_their_own_buckets() -> None:
    ngrams = NgramRows(hashes(two=True))
    ids = torch.randint(0, 512, (500, 4), generator=torch.Generator().manual_seed(0))
    rows = ngrams(ids, torch.ones_like(ids).bool())
    assert (rows >= ngrams.offsets).all() and (rows < ngrams.offsets + ngrams.primes).all()
    assert all(len(set(column.tolist())) > 100 for column in rows.flatten(1).T), "a hash spreads"


def test_how_far_each_column_looks() -> None:
    """The 2-gram columns see one token back, the 3-gram columns two, and no column three."""
    ngrams, known = NgramRows(hashes()), torch.ones(1, 3).bool()
    base = ngrams(torch.tensor([[40, 50, 60]]), known)[0, 0]
    further = ngrams(torch.tensor([[41, 50, 60]]), known)[0, 0]
    nearer = ngrams(torch.tensor([[40, 51, 60]]), known)[0, 0]
    assert (base != further).tolist() == [False, False, True, True]
    assert (base != nearer).all()


def test_unknown_ids_may_be_anything() -> None:
    """Pages that nobody wrote hold anything, also ids far outside the vocabulary."""
    ngrams, known = NgramRows(hashes()), torch.tensor([[False, False, True]])
    wanted = ngrams(torch.tensor([[0, 0, 60]]), known)
    for garbage in ([-1, 2**31 - 1], [511, 512], [-(2**31), 5]):
        assert torch.equal(ngrams(torch.tensor([[*garbage, 60]]), known), wanted)
    # A gap hides what lies before it.
    gap = torch.tensor([[True, False, True]])
    assert torch.equal(ngrams(torch.tensor([[9, 9, 60]]), gap), wanted)


def test_int32_ids_of_a_paged_cache() -> None:
    ngrams, ids = NgramRows(hashes()), torch.randint(0, 512, (20, 3))
    known = torch.ones_like(ids).bool()
    assert torch.equal(ngrams(ids.int(), known), ngrams(ids, known))


def test_the_hash_is_no_weight() -> None:
    ngrams = NgramRows(hashes())
    assert not list(ngrams.parameters()) and not ngrams.state_dict()
    assert {buffer.dtype for buffer in ngrams.buffers()} == {torch.int64}
    assert NgramRows(hashes()).to(torch.bfloat16).multipliers.dtype == torch.int64


def engram(dtype: torch.dtype = torch.float32) -> Engram:
    torch.manual_seed(0)
    module = Engram(text_config(), 0, dtype)
    module.q_weight.data = noise(4, 64, seed=1, dtype=dtype)
    module.k_weight.data = noise(4, 64, seed=2, dtype=dtype)
    return module


ROWS = torch.tensor([[1, 2, 3, 4], [4095, 0, 17, 17], [9, 8, 7, 6]])


def test_gate_and_value_one_stream_at_a_time() -> None:
    module, streams = engram(), noise(3, 4, 64, seed=3)
    found = module(streams, ROWS, None)
    for token in range(3):
        read = torch.cat([module.embed.weight[row] for row in ROWS[token]]).double()
        memory = module.wkv.weight.double() @ read
        value = memory[256:]
        for n in range(4):
            key, stream = memory[64 * n : 64 * n + 64], streams[token, n].double()
            weight = module.q_weight[n].double() * module.k_weight[n].double()
            match = (normal(stream) * weight * normal(key)).sum().item() / 8
            gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(match), 1e-6)), match)))
            torch.testing.assert_close(found[token, n].double(), stream + gate * value, rtol=1e-4, atol=1e-5)


def normal(values: torch.Tensor) -> torch.Tensor:
    return values / (values.square().mean() + 1e-20).sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_image_positions_are_gated_to_zero(dtype: torch.dtype) -> None:
    module, streams = engram(dtype), noise(3, 4, 64, seed=3, dtype=dtype)
    closed = torch.tensor([False, True, False])
    found = module(streams, ROWS, closed)
    assert found.dtype == dtype
    assert torch.equal(found[1], streams[1])
    assert torch.equal(found[[0, 2]], module(streams, ROWS, None)[[0, 2]])
    assert not torch.equal(found[0], streams[0])


def test_gradients_reach_every_parameter() -> None:
    module, streams = engram(), noise(3, 4, 64, seed=3).requires_grad_()
    module(streams, ROWS, None).square().sum().backward()
    for name, parameter in [*module.named_parameters(), ("streams", streams)]:
        assert parameter.grad is not None and float(parameter.grad.abs().sum()) > 0, name
    assert module.embed.weight.grad is not None
    touched = module.embed.weight.grad.abs().sum(1).nonzero().flatten().tolist()
    assert touched == sorted(set(ROWS.flatten().tolist()))
