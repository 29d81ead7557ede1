"""The models of the benchmark: a dense one, whose attention grows with the context, and a small V4.1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_deepinfer.checkpoint.options import TinyOptions
from vllm_deepinfer.checkpoint.tiny import write_checkpoint

DENSE, V41 = "dense", "v41"
MODELS = (DENSE, V41)

LONGEST = {DENSE: 24_576, V41: 8_192}  # tokens of a sequence
DIVIDED = {DENSE: 1, V41: 4}  # prompts of V4.1 are this much shorter: two cores run it slowly
LARGEST_CHUNK = 8_192

DENSE_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 8_192,
    "hidden_size": 512,
    "intermediate_size": 1_536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}

V41_OPTIONS = TinyOptions(
    hidden=256,
    heads=8,
    head_dim=64,
    window=128,
    overrides={"max_position_embeddings": LONGEST[V41], "index_topk": 128, "candidate_topk_blocks": 64},
)


def dense_config(quick: bool) -> dict[str, Any]:
    """Half of the layers in a quick run: windows of seconds must see whole prompts."""
    return {**DENSE_CONFIG, "num_hidden_layers": 2} if quick else DENSE_CONFIG


def write(name: str, folder: Path, quick: bool) -> Path:
    """The folder that vLLM is started on."""
    path = folder / name
    if name == V41:
        write_checkpoint(path, V41_OPTIONS)
    else:
        path.mkdir()
        (path / "config.json").write_text(json.dumps(dense_config(quick), indent=2))
    return path


def engine_settings(name: str) -> dict[str, Any]:
    """Arguments of vLLM's LLM. The dense model's weights are dummies: only its time is asked for."""
    return {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "load_format": "dummy" if name == DENSE else "auto",
        "skip_tokenizer_init": True,
        "max_model_len": LONGEST[name],
        "max_num_batched_tokens": LARGEST_CHUNK,
        "max_num_seqs": 64,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        # Schedulers are swapped in the running engine, vLLM's own among them, which sends no replays.
        "additional_config": {"deepinfer": {"encoder_replay": False, "decoder_replay": False}},
    }
