from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from vllm_deepinfer.checkpoint.config import ConfigError, V41Config
from vllm_deepinfer.checkpoint.layout import Encoding
from vllm_deepinfer.checkpoint.options import TinyOptions

from .samples import config, sentence


def build(**changes: Any) -> dict[str, Any]:
    options = TinyOptions(**changes)
    return options.build_config(options.build_tokenizer())


def refused(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(**changes)
    return sentence(caught.value)


def test_the_default_is_a_small_text_only_model() -> None:
    built = V41Config.from_dict(build())
    assert built.text_config.num_hidden_layers == 8
    assert built.text_config.vocab_size == 1024
    assert built.text_config.max_position_embeddings == 8192
    assert built.vision_config.num_hidden_layers == 0
    assert (built.dtype, built.quantization_config) == ("float32", None)


@pytest.mark.parametrize("part", ["text_config", "vision_config", "quantization_config"])
def test_every_released_key_is_there_and_no_other(part: str) -> None:
    assert set(build(encoding="released", dspark_blocks=3)[part]) == set(config("released")[part])


def test_keys_come_in_the_released_order() -> None:
    built, released = build(encoding="released", dspark_blocks=3), config("released")
    assert list(built["text_config"]) == list(released["text_config"])
    assert [key for key in built if key in released] == list(released)


def test_what_the_architecture_fixes_is_as_released() -> None:
    built, released = build()["text_config"], config("released")["text_config"]
    fixed = [
        *(
            "num_key_value_heads",
            "hidden_act",
            "swiglu_limit",
            "rms_norm_eps",
            "rope_theta",
            "compress_rope_theta",
        ),
        *("n_shared_experts", "scoring_func", "topk_method", "norm_topk_prob", "routed_scaling_factor"),
        *("hc_mult", "hc_sinkhorn_iters", "hc_eps", "engram_max_ngram_size", "engram_pad_token_id"),
    ]
    assert {name: built[name] for name in fixed} == {name: released[name] for name in fixed}


@pytest.mark.parametrize(
    ("encoding", "dtype", "quantised"),
    [("fp32", "float32", False), ("bf16", "bfloat16", False), ("released", "bfloat16", True)],
)
def test_encodings(encoding: Encoding, dtype: str, quantised: bool) -> None:
    built = build(encoding=encoding)
    assert built["dtype"] == dtype
    assert ("quantization_config" in built) == quantised


def test_the_release_can_be_described() -> None:
    """The options and the overrides together reach the released config in every field of the text model."""
    released = config("released")["text_config"]
    sizes = {
        name: released[name]
        for name in (
            *(
                "q_lora_rank",
                "o_lora_rank",
                "o_groups",
                "index_n_heads",
                "index_topk",
                "candidate_topk_blocks",
            ),
            *("candidate_block_size", "index_source_layer_ids", "engram_vocab_size", "engram_n_heads"),
            *("engram_head_dim", "dspark_markov_rank", "dspark_n_routed_experts"),
        )
    }
    built = build(
        ratios=released["compress_ratios"][:40],
        kv_sources=(2, 8, 14, 20),
        engram_layers=(1, 14),
        hidden=5120,
        heads=64,
        head_dim=512,
        experts=384,
        top_k=6,
        expert_width=2304,
        window=128,
        tokenizer="released",
        context_length=1048576,
        dspark_blocks=3,
        encoding="released",
        overrides=sizes,
    )
    assert built["text_config"] == released
    assert built["quantization_config"] == config("released")["quantization_config"]
    assert built["image_token_id"] == 129264


def test_ids_of_the_small_tokenizer() -> None:
    built = build(dspark_blocks=1)
    assert (built["image_token_id"], built["text_config"]["dspark_noise_token_id"]) == (10, 5)


def test_a_config_is_json() -> None:
    assert json.loads(json.dumps(build(dspark_blocks=3))) == build(dspark_blocks=3)


@pytest.mark.parametrize(
    ("changes", "beginning"),
    [
        ({"heads": 3, "overrides": {"o_groups": 2}}, "text_config.o_groups is 2, which does not divide"),
        (
            {"hidden": 48, "encoding": "released"},
            "text_config.hidden_size is 48: write a multiple of 32, because",
        ),
        (
            {"expert_width": 40, "encoding": "released"},
            "text_config.moe_intermediate_size is 40: write a multiple",
        ),
        (
            {"overrides": {"engram_head_dim": 16}, "encoding": "released"},
            "text_config.engram_head_dim is 16: write a multiple of 32, because",
        ),
        ({"vocab": 280}, "a vocabulary of 280 cannot hold"),
        (
            {"tokenizer": "released", "vocab": 1024},
            "text_config.vocab_size is 1024: write 129280, or leave it out",
        ),
        ({"candidate_source": 3}, "text_config.candidate_source_layer_id is 3, which is no KV source: "),
        ({"overrides": {"index_top": 3}}, '"index_top" is no field of text_config: did you mean index_topk?'),
        ({"overrides": {"zzz": 3}}, '"zzz" is no field of text_config: see the released config.json'),
        (
            {"overrides": {"vocab_size": 3}},
            "vocab_size follows from the tokenizer: choose its size with --vocab",
        ),
        ({"overrides": {"index_topk": "many"}}, "text_config.index_topk cannot be read: "),
    ],
)
def test_refusals(changes: dict[str, Any], beginning: str) -> None:
    assert refused(**changes).startswith(beginning)


def test_odd_widths_are_legal_where_nothing_is_quantised() -> None:
    assert build(hidden=48, expert_width=40)["text_config"]["moe_intermediate_size"] == 40


def test_no_engram_needs_no_whole_blocks() -> None:
    built = build(encoding="released", engram_layers=(), overrides={"engram_head_dim": 16})
    assert built["text_config"]["engram_layer_ids"] == []


@pytest.mark.parametrize(
    "changes", [{"layer": 3}, {"encoding": "fp8"}, {"layers": "x"}, {"tokenizer": "real"}]
)
def test_options_that_do_not_exist(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TinyOptions(**changes)
