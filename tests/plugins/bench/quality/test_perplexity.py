"""Losses against sums by hand."""

from __future__ import annotations

from math import exp, log

import torch
from vllm_deepinfer_plugins.bench.quality.perplexity import (
    Loss,
    Replays,
    loss_of,
    replays_of,
    unquantised_caches,
)
from vllm_deepinfer_plugins.bench.quality.texts import Text
from vllm_deepinfer_plugins.model.quant import quantize_cache

from tests.plugins.model.samples import backbone, noise, token_ids


def text(length: int, counted: int) -> Text:
    ids = tuple(token_ids(length).tolist())
    return Text(ids, (*[False] * (length - counted), *[True] * counted), counted * 3)


def test_units() -> None:
    loss = Loss(log(2) * 30, 10, 20) + Loss(log(2) * 10, 10, 20)
    assert abs(loss.bits_per_token - 2) < 1e-12
    assert abs(loss.bits_per_character - 1) < 1e-12
    assert abs(loss.perplexity - 4) < 1e-12


def test_the_loss_is_that_of_the_tokens_that_count() -> None:
    some = text(40, 10)
    found = loss_of(backbone(), [some, some])
    ids = torch.tensor(some.ids)
    with torch.no_grad():
        logs = backbone().whole(ids.unsqueeze(0))[0].log_softmax(-1)
    by_hand = -sum(float(logs[at - 1, ids[at]]) for at in range(30, 40))
    assert found.tokens == 20 and found.characters == 60
    assert abs(found.nats - 2 * by_hand) < 1e-3


def test_caches_are_rounded_again_behind_the_block() -> None:
    values = noise(4, 32)
    with unquantised_caches():
        assert torch.equal(quantize_cache(values, "fp8"), values)
        finer = loss_of(backbone(), [text(40, 10)])
    assert not torch.equal(quantize_cache(values, "fp8"), values)
    assert finer.nats != loss_of(backbone(), [text(40, 10)]).nats


def test_replays_compare_the_same_tokens() -> None:
    """Random weights lose something by a replay; short texts are left out."""
    found = replays_of(backbone(), [text(160, 159), text(40, 39)], 30)
    assert found.cold.tokens == found.encoder.tokens == found.decoder.tokens == 30
    assert len({found.cold.nats, found.encoder.nats, found.decoder.nats}) == 3
    cold, replay = Loss(10.0, 10), Loss(11.0, 10)
    assert abs(Replays(cold, replay, cold).ratio("encoder") - exp(0.1)) < 1e-12
