from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from vllm_deepinfer.checkpoint.config import ConfigError, TextConfig
from vllm_deepinfer.checkpoint.engram import EngramHash
from vllm_deepinfer.checkpoint.options import TinyOptions
from vllm_deepinfer.checkpoint.text_fields import text_fields
from vllm_deepinfer.checkpoint.tokenizer import small_tokenizer

from .samples import text


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return small_tokenizer(300)


def fields(tokenizer: Tokenizer, **changes: Any) -> dict[str, Any]:
    return text_fields(TinyOptions(**changes), tokenizer, noise=5)


def test_the_default_schedule_is_that_of_the_golden_checkpoint(tokenizer: Tokenizer) -> None:
    built, golden = fields(tokenizer), text("tiny")
    for name in (
        "compress_ratios",
        "kv_source_layer_ids",
        "index_source_layer_ids",
        "candidate_source_layer_id",
    ):
        assert built[name] == golden[name]


@pytest.mark.parametrize(
    ("layers", "ratios", "kv_sources", "index_sources", "engram"),
    [
        (1, [0], [], [], []),
        (2, [0, 0], [], [], [1]),
        (3, [0, 0, 1], [2], [2], [1]),
        (4, [0, 0, 1, 1], [2], [2], [1]),
        (6, [0, 0, 2, 1, 1, 1], [2, 3], [2, 3, 5], [1, 2]),
        (12, [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1], [2, 6], [2, 6, 8, 10], [1, 5]),
    ],
)
def test_schedules_by_depth(
    tokenizer: Tokenizer,
    layers: int,
    ratios: list[int],
    kv_sources: list[int],
    index_sources: list[int],
    engram: list[int],
) -> None:
    built = fields(tokenizer, layers=layers)
    assert built["compress_ratios"] == ratios
    assert built["kv_source_layer_ids"] == kv_sources
    assert built["index_source_layer_ids"] == index_sources
    assert built["engram_layer_ids"] == engram
    assert built["candidate_source_layer_id"] == (kv_sources[-1] if kv_sources else -1)


def test_sources_follow_from_ratios(tokenizer: Tokenizer) -> None:
    built = fields(tokenizer, ratios=(2, 0, 2, 1, 1, 0, 1, 3))
    assert built["num_hidden_layers"] == 8
    assert built["kv_source_layer_ids"] == [0, 3, 7]
    assert built["index_source_layer_ids"] == [0, 3, 7]


def test_what_is_given_is_not_derived(tokenizer: Tokenizer) -> None:
    built = fields(
        tokenizer,
        ratios=(1, 1, 1, 1),
        kv_sources=(0, 2),
        index_sources=(0, 1, 2),
        candidate_source=-1,
        engram_layers=(0,),
        expert_width=96,
    )
    assert built["kv_source_layer_ids"] == [0, 2]
    assert built["index_source_layer_ids"] == [0, 1, 2]
    assert built["candidate_source_layer_id"] == -1
    assert built["engram_layer_ids"] == [0]
    assert built["moe_intermediate_size"] == 96


@given(
    ratios=st.lists(st.integers(0, 3), min_size=1, max_size=10),
    heads=st.integers(1, 9),
    head_dim=st.integers(2, 40).map(lambda half: 4 * half),
    hidden=st.integers(1, 200),
    blocks=st.integers(0, 3),
    top_k=st.integers(1, 8),
)
def test_every_shape_has_a_model(
    tokenizer: Tokenizer, ratios: list[int], heads: int, head_dim: int, hidden: int, blocks: int, top_k: int
) -> None:
    """Whatever sizes are given, the rest is derived so that the whole can run."""
    built = fields(
        tokenizer,
        ratios=tuple(ratios),
        heads=heads,
        head_dim=head_dim,
        hidden=hidden,
        dspark_blocks=blocks,
        top_k=top_k,
        expert_width=32,
    )
    config = TextConfig(**built)
    assert len(config.schedule()) == len(ratios)
    if config.engram_layer_ids:
        EngramHash.build(config, tokenizer)


def test_rope_fits_the_heads_and_the_indexer(tokenizer: Tokenizer) -> None:
    small, large = fields(tokenizer), fields(tokenizer, head_dim=512)
    assert (small["qk_rope_head_dim"], small["index_head_dim"]) == (16, 32)
    assert (large["qk_rope_head_dim"], large["index_head_dim"]) == (64, 128)


def test_yarn_stretches_to_the_context_length(tokenizer: Tokenizer) -> None:
    scaling = fields(tokenizer, context_length=1048576)["rope_scaling"]
    assert scaling == text("released")["rope_scaling"]


def test_engram_tables_have_the_rows_of_their_buckets(tokenizer: Tokenizer) -> None:
    built = fields(tokenizer)
    hashing = EngramHash.build(TextConfig(**built), tokenizer)
    assert built["engram_num_embeddings"] == hashing.primes.sum(axis=1).tolist()
    changed = fields(tokenizer, overrides={"engram_vocab_size": 1000, "engram_n_heads": 4})
    assert changed["engram_num_embeddings"][0] > 3 * 4 * 1000


def test_engram_rows_may_be_given(tokenizer: Tokenizer) -> None:
    built = fields(tokenizer, overrides={"engram_num_embeddings": [5000, 6000]})
    assert built["engram_num_embeddings"] == [5000, 6000]


def test_an_engram_size_of_the_wrong_type_is_left_to_the_config(tokenizer: Tokenizer) -> None:
    built = fields(tokenizer, overrides={"engram_n_heads": "two"})
    with pytest.raises(ConfigError, match=r"text_config\.engram_n_heads cannot be read"):
        TextConfig(**built)


def test_dspark(tokenizer: Tokenizer) -> None:
    built = fields(tokenizer, dspark_blocks=2)
    assert built["num_nextn_predict_layers"] == 2
    assert built["compress_ratios"][-2:] == [0, 0]
    assert built["dspark_target_layer_ids"] == [5, 6, 7]
    assert built["dspark_noise_token_id"] == 5
    assert fields(tokenizer, layers=2, dspark_blocks=1)["dspark_target_layer_ids"] == [0, 1]
    assert not any(name.startswith("dspark") for name in fields(tokenizer))


def test_overrides_come_last(tokenizer: Tokenizer) -> None:
    built = fields(tokenizer, hidden=96, overrides={"hidden_size": 128, "index_topk": 7})
    assert (built["hidden_size"], built["index_topk"]) == (128, 7)
