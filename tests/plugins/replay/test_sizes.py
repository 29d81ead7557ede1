"""Lengths from a checkpoint's config."""

from __future__ import annotations

from types import SimpleNamespace

from vllm_deepinfer_plugins.replay.sizes import Sizes

from tests.plugins.model.samples import text_config


def test_as_released() -> None:
    released = SimpleNamespace(
        sliding_window=128, dspark_block_size=5, engram_max_ngram_size=4, engram_layer_ids=[1, 14]
    )
    assert Sizes.of(released) == Sizes(window=128, rows=140, lookback=3)


def test_without_drafter_and_engram() -> None:
    assert Sizes.of(SimpleNamespace(sliding_window=8)) == Sizes(8, 10, 0)
    assert Sizes.of(SimpleNamespace(sliding_window=8, dspark_block_size=None)) == Sizes(8, 10, 0)


def test_of_the_fixture() -> None:
    config = text_config()
    assert Sizes.of(config).lookback == config.engram_max_ngram_size - 1
