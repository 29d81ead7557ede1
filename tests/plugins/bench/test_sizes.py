"""Both models are legal, equal where they can be, and of the size that the issue names."""

from __future__ import annotations

import pytest
from vllm_deepinfer_plugins.bench import sizes

from vllm_deepinfer.checkpoint.config import V41Config


@pytest.fixture(scope="module")
def ours() -> dict[str, object]:
    options = sizes.v41_options()
    config = options.build_config(options.build_tokenizer())
    V41Config.from_dict(config)
    text = config["text_config"]
    assert isinstance(text, dict)
    return text


def test_the_issue_names_these(ours: dict[str, object]) -> None:
    named = {
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "head_dim": 512,
    }
    assert named.items() <= sizes.v4_config().items()
    assert named.items() <= ours.items()
    assert sizes.ENGINE["dtype"] == sizes.v4_config()["dtype"] == "bfloat16"
    assert sizes.ENGINE["enforce_eager"] is True


def test_equal_wherever_both_have_the_field(ours: dict[str, object]) -> None:
    different = {
        name: (value, ours[name])
        for name, value in sizes.v4_config().items()
        if name in ours and ours[name] != value
    }
    expected = {
        "model_type": ("deepseek_v4", "deepseek_v41_text"),
        "compress_ratios": ([0, 4, 128, 4], [0, 2, 2, 1]),
        "rms_norm_eps": (1e-6, 1e-20),  # a constant of each architecture, without a price
    }
    assert different == expected


def test_compressed_layers_and_indexers_are_as_many(ours: dict[str, object]) -> None:
    assert sum(ratio > 1 for ratio in sizes.V4_RATIOS) == sum(ratio > 0 for ratio in sizes.V41_RATIOS) == 3
    assert sizes.V4_RATIOS.count(4) == len(sizes.V41_SOURCES) == 2  # V4 has an indexer where the ratio is 4
    assert ours["kv_source_layer_ids"] == ours["index_source_layer_ids"] == [1, 3]


def test_the_fused_kernels_of_v4_accept_the_sizes() -> None:
    config = sizes.v4_config()
    assert config["head_dim"] == config["index_topk"] == 512
    assert config["n_routed_experts"] in (64, 128, 256, 384)
    assert config["num_experts_per_tok"] in (6, 8)


def test_a_prompt_of_2048_tokens_is_one_chunk_and_eight_decoding_requests_fit() -> None:
    assert sizes.ENGINE["max_num_batched_tokens"] == 2048
    assert sizes.ENGINE["max_num_seqs"] >= 8
    assert sizes.ENGINE["max_model_len"] == sizes.v4_config()["max_position_embeddings"] > 2048
    assert sizes.ENGINE["enable_prefix_caching"] is False
