"""The model and the engines that `bench replay` compares, as data.

The layer schedule is the released one: 20 layers of causal encoder, 20 of decoder, window 128, four KV
sources, eight index sources. Widths are the released ones divided by four to forty.
"""

from __future__ import annotations

from typing import Any

from vllm_deepinfer.checkpoint.options import TinyOptions

CONTEXT = 17408  # a warm prefix of 16k, its longest suffix, and the answer
VOCAB = 2048

OPTIONS = TinyOptions(
    ratios=(0, 0, *[2] * 18, *[1] * 20),
    kv_sources=(2, 8, 14, 20),
    index_sources=(2, 8, 14, 20, 24, 28, 32, 36),
    candidate_source=20,
    engram_layers=(1, 14),
    hidden=128,  # released: 5120
    heads=4,  # released: 64
    head_dim=128,  # released: 512
    experts=16,  # released: 384, of which 6 are taken
    top_k=2,
    expert_width=64,  # released: 2304
    window=128,
    vocab=VOCAB,
    context_length=CONTEXT,
    encoding="bf16",
    overrides={
        "index_head_dim": 32,  # released: 128, a quarter of head_dim as here
        "qk_rope_head_dim": 32,  # released: 64
        "index_topk": 512,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "engram_n_heads": 4,
        "engram_head_dim": 32,
        "engram_vocab_size": 2048,
        "dspark_block_size": 5,  # nothing is drafted; the rows that are kept count on it
    },
)

REPLAY, KEPT, RESTORED = "replay", "kept", "restored"
SETTINGS: dict[str, dict[str, Any]] = {
    REPLAY: {"encoder_replay": True, "decoder_replay": True, "window_tier_mib": 0},
    KEPT: {"encoder_replay": False, "decoder_replay": False},
    RESTORED: {"encoder_replay": True, "decoder_replay": True, "window_tier_mib": 256},
}
"""What ``additional_config`` says on each side; `KEPT` is the engine without any of it."""

ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": CONTEXT,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 8,
    "enable_prefix_caching": True,
    # Window KV at every block, so that where windows are kept a hit may end where one with replay may; vLLM's
    # default keeps it at the ends of prompts alone.
    "prefix_cache_retention_interval": None,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "seed": 0,
}
