from __future__ import annotations

from typing import Any

import pytest

from vllm_deepinfer.checkpoint.checks import MAX_EXPERTS, engram_primes

from .samples import refusal, text_config

POSITIVE = [
    *("vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("head_dim", "qk_rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "n_routed_experts"),
    *("num_experts_per_tok", "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "hc_mult"),
    *("hc_sinkhorn_iters", "max_position_embeddings"),
]


@pytest.mark.parametrize("field", POSITIVE)
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_are_positive(field: str, value: int) -> None:
    assert refusal(**{field: value}) == f"text_config.{field} is {value}: write a positive number"


@pytest.mark.parametrize(
    "field", ["rms_norm_eps", "hc_eps", "rope_theta", "compress_rope_theta", "routed_scaling_factor"]
)
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_factors_are_positive_and_finite(field: str, value: float) -> None:
    assert refusal(**{field: value}) == f"text_config.{field} is {value}: write a positive number"


@pytest.mark.parametrize(
    ("field", "value", "beginning"),
    [
        (
            "num_key_value_heads",
            4,
            "text_config.num_key_value_heads is 4: write 1, because all heads share one",
        ),
        ("n_shared_experts", 2, "text_config.n_shared_experts is 2: write 1, because"),
        ("n_shared_experts", 0, "text_config.n_shared_experts is 0: write 1, because"),
        ("scoring_func", "softmax", 'text_config.scoring_func is "softmax": write "sqrtsoftplus", because'),
        ("topk_method", "greedy", 'text_config.topk_method is "greedy": write "noaux_tc", because'),
        ("hidden_act", "gelu", 'text_config.hidden_act is "gelu": write "silu", because'),
        ("attention_bias", True, "text_config.attention_bias is true: write false, because"),
        (
            "tie_word_embeddings",
            True,
            "text_config.tie_word_embeddings is true: write false, because embed and",
        ),
        ("swiglu_limit", -1.0, "text_config.swiglu_limit is -1.0: write the clamp, or 0 for none"),
        ("attention_dropout", 1.0, "text_config.attention_dropout is 1.0: write a number in [0, 1)"),
        ("o_groups", 3, "text_config.o_groups is 3, which does not divide num_attention_heads 4: "),
        ("qk_rope_head_dim", 15, "text_config.qk_rope_head_dim is 15: write an even number of at most 32, "),
        ("qk_rope_head_dim", 34, "text_config.qk_rope_head_dim is 34: write an even number of at most 32, "),
        ("index_head_dim", 8, "text_config.qk_rope_head_dim is 16: write an even number of at most 8, "),
        ("num_experts_per_tok", 9, "text_config.num_experts_per_tok is 9: write at most n_routed_experts 8"),
    ],
)
def test_what_the_architecture_fixes_or_limits(field: str, value: Any, beginning: str) -> None:
    assert refusal(**{field: value}).startswith(beginning)


def test_no_clamp_and_all_experts_are_legal() -> None:
    config = text_config(swiglu_limit=0.0, num_experts_per_tok=8)
    assert (config.swiglu_limit, config.num_experts_per_tok) == (0.0, 8)


@pytest.mark.parametrize(
    ("scaling", "beginning"),
    [
        (None, "text_config.rope_scaling is missing: write the YaRN settings of the compressed path, or "),
        (
            {"rope_type": "linear"},
            'text_config.rope_scaling.rope_type is "linear": write "yarn" or "default"',
        ),
        ({"rope_type": "yarn"}, "text_config.rope_scaling.factor is null: write a number of at least 1"),
        ({"factor": 0.5}, "text_config.rope_scaling.factor is 0.5: "),
        ({"factor": True}, "text_config.rope_scaling.factor is true: "),
        ({"factor": 16}, "text_config.rope_scaling.original_max_position_embeddings is null: "),
        (
            {"factor": 16, "original_max_position_embeddings": 256, "beta_fast": 0},
            "text_config.rope_scaling.beta_fast is 0: write a positive number",
        ),
    ],
)
def test_rope_scaling(scaling: dict[str, Any] | None, beginning: str) -> None:
    assert refusal(rope_scaling=scaling).startswith(beginning)


def test_rope_scaling_may_be_switched_off_in_so_many_words() -> None:
    assert text_config(rope_scaling={"rope_type": "default"}).rope_scaling == {"rope_type": "default"}


@pytest.mark.parametrize(
    ("changes", "beginning"),
    [
        ({"engram_num_embeddings": ...}, "text_config.engram_num_embeddings has 0 entries for the 1 layers"),
        (
            {"engram_num_embeddings": [4096, 4096]},
            "text_config.engram_num_embeddings has 2 entries for the 1",
        ),
        ({"engram_layer_ids": []}, "text_config.engram_num_embeddings has 1 entries for the 0 layers"),
        ({"engram_vocab_size": ...}, "text_config.engram_vocab_size is 0: write a positive number because"),
        ({"engram_n_heads": ...}, "text_config.engram_n_heads is 0: "),
        ({"engram_head_dim": 0}, "text_config.engram_head_dim is 0: "),
        ({"engram_compressed_vocab_size": ...}, "text_config.engram_compressed_vocab_size is 0: "),
        ({"engram_max_ngram_size": ...}, "text_config.engram_max_ngram_size is 0: write 2 or more, because"),
        ({"engram_max_ngram_size": 1}, "text_config.engram_max_ngram_size is 1: write 2 or more, because"),
        (
            {"engram_max_ngram_size": 10_000},
            "text_config.engram_max_ngram_size 10000 and engram_n_heads 2 make 19998 hash columns in a ",
        ),
        (
            {"engram_pad_token_id": 512},
            "text_config.engram_pad_token_id is 512: write a token id below vocab_s",
        ),
        ({"engram_pad_token_id": -1}, "text_config.engram_pad_token_id is -1: "),
        (
            {"engram_num_embeddings": [1247]},
            "text_config.engram_num_embeddings gives layer 1 1247 rows, but its hash buckets need 1248: ",
        ),
    ],
)
def test_engram(changes: dict[str, Any], beginning: str) -> None:
    assert refusal(**changes).startswith(beginning)


def test_a_slip_in_the_number_of_experts_is_no_model() -> None:
    layers = text_config().num_hidden_layers
    most = MAX_EXPERTS // layers
    assert text_config(n_routed_experts=most).n_routed_experts == most
    assert refusal(n_routed_experts=most + 1) == (
        f"text_config.n_routed_experts is {most + 1} in each of {layers} layers: write at most {most}"
    )


def test_an_engram_table_may_have_just_the_rows_of_its_buckets() -> None:
    config = text_config(engram_num_embeddings=[1248])
    assert engram_primes(config) == ((307, 311, 313, 317),)


def test_without_engram_its_sizes_may_be_missing() -> None:
    gone = dict.fromkeys(
        ("engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_max_ngram_size"), ...
    )
    config = text_config(
        engram_layer_ids=[], engram_num_embeddings=[], engram_compressed_vocab_size=..., **gone
    )
    assert (config.engram_layer_ids, config.engram_vocab_size) == ((), 0)


@pytest.mark.parametrize(
    ("changes", "beginning"),
    [
        ({"num_nextn_predict_layers": -1}, "text_config.num_nextn_predict_layers is -1: write the number of"),
        ({"dspark_block_size": 0}, "text_config.dspark_block_size is 0: write a positive number because"),
        ({"dspark_markov_rank": ...}, "text_config.dspark_markov_rank is 0: "),
        ({"dspark_n_routed_experts": 0}, "text_config.dspark_n_routed_experts is 0: "),
        (
            {"dspark_num_experts_per_tok": 5},
            "text_config.dspark_num_experts_per_tok is 5: write at most dspark_n",
        ),
        (
            {"dspark_target_layer_ids": ...},
            "text_config.dspark_target_layer_ids is []: write increasing layer",
        ),
        (
            {"dspark_target_layer_ids": [5, 6, 8]},
            "text_config.dspark_target_layer_ids is [5, 6, 8]: write incr",
        ),
        (
            {"dspark_target_layer_ids": [6, 5]},
            "text_config.dspark_target_layer_ids is [6, 5]: write increasing",
        ),
        ({"dspark_noise_token_id": 512}, "text_config.dspark_noise_token_id is 512: write a token id below"),
        (
            {"compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 1, 0]},
            "text_config.compress_ratios gives the 3 DSpark blocks after layer 7 the ratios [0, 1, 0]: "
            "write 0",
        ),
    ],
)
def test_dspark(changes: dict[str, Any], beginning: str) -> None:
    assert refusal(**changes).startswith(beginning)


def test_ratios_of_dspark_blocks_may_be_left_out() -> None:
    config = text_config(compress_ratios=[0, 0, 2, 2, 1, 1, 1, 1])
    assert config.num_nextn_predict_layers == 3


def test_without_dspark_its_fields_are_not_read() -> None:
    config = text_config(
        num_nextn_predict_layers=0, dspark_target_layer_ids=[99], dspark_noise_token_id=10**6
    )
    assert config.num_nextn_predict_layers == 0
