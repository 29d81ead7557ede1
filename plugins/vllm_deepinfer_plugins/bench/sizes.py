"""The two models that `bench model` compares, as data: equal wherever both architectures have the item.

The issue fixes hidden 512, 4 layers, 64 experts top-6, head_dim 512, bf16. Everything else is the released
V4.1-Flash divided by eight to ten, rounded to what vLLM's fused V4 kernels accept (64, 128, 256 or 384
experts; top-6 or top-8; head_dim 512; bf16; index_topk 512).
"""

from __future__ import annotations

from typing import Any

from vllm_deepinfer.checkpoint.options import TinyOptions

LAYERS = 4
VOCAB = 8192  # not 129,280: the head is the same product in both, and would take most of a decode step
CONTEXT = 4096  # longest sequence, in tokens

# The text_config fields that both architectures have, under the name that both give them.
SHARED: dict[str, Any] = {
    "hidden_size": 512,
    "moe_intermediate_size": 256,  # released: 2304
    "num_attention_heads": 8,  # released: 64
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,  # released: 1280
    "o_lora_rank": 128,  # released: 1024
    "o_groups": 8,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "index_n_heads": 4,  # released: 32
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
}

# Where the two cannot be equal. Both have one layer with the window alone and three with compressed
# attention, two of which run an indexer.
# - Ratios. V4 knows 4 (with indexer) and 128 (dense), V4.1 knows 2 and 1. At 2,048 tokens V4's three layers
#   attend to at most 512, 16 and 512 compressed positions, and its indexers score none: up to 512 positions
#   all are selected. V4.1's three attend to 512 each, picked out of 1,024, 1,024 and 2,048. More for V4.1.
# - Compressors. V4: one per compressed layer and one per indexer, five in all, with overlapping windows.
#   V4.1: one per KV source, two in all. Less for V4.1.
# - mHC. V4 mixes before every sub-layer and once more at the head, V4.1 in a single pass. Less for V4.1.
# - Engram. V4.1 alone: one layer, where the release has two in forty. More for V4.1.
# - Cache formats. V4: FP8 throughout. V4.1: FP8 window, E2M1 compressed KV, MXFP4 index queries and keys, for
#   which CPUs have no instructions. More for V4.1.
V4_RATIOS = (0, 4, 128, 4)
V41_RATIOS = (0, 2, 2, 1)
V41_SOURCES = (1, 3)  # own compressed KV, and select positions in it

V41_ONLY: dict[str, Any] = {
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "engram_n_heads": 8,
    "engram_head_dim": 32,  # released: 256
    "engram_vocab_size": 4096,  # buckets per table; released: 16,000,000, of which a token reads as few rows
}


def v4_config() -> dict[str, Any]:
    """The config.json of the DeepSeek-V4 that vLLM's own CPU class serves."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "num_hash_layers": 0,  # V4.1 has none; with any, V4 would route the layers by a table
        "num_nextn_predict_layers": 0,
        "expert_dtype": "bf16",
        "compress_ratios": list(V4_RATIOS),
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": CONTEXT // 16,
        },
        **SHARED,
    }


def v41_options() -> TinyOptions:
    """The DeepSeek-V4.1 checkpoint that our class serves, for `write_checkpoint`."""
    return TinyOptions(
        ratios=V41_RATIOS,
        kv_sources=V41_SOURCES,
        index_sources=V41_SOURCES,
        candidate_source=V41_SOURCES[-1],
        engram_layers=(1,),
        vocab=VOCAB,
        context_length=CONTEXT,
        encoding="bf16",
        overrides=SHARED | V41_ONLY,
    )


# How both engines are started; what else they are given is in `worker.py`.
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": CONTEXT,
    "max_num_batched_tokens": 2048,  # a prompt of 2,048 tokens is one chunk
    "max_num_seqs": 16,
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "seed": 0,
    # The classes are compared, not what one may leave out: every row goes through every layer.
    "additional_config": {"deepinfer": {"encoder_replay": False, "decoder_replay": False}},
}
