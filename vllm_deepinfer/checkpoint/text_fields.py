"""The text_config of a small checkpoint: what its options say, and the rest as the release does it."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from .checks import MAX_COLUMNS, engram_columns
from .config import TextConfig
from .engram import compressed_token_map
from .errors import ConfigError
from .primes import bucket_primes

if TYPE_CHECKING:
    from .options import TinyOptions


def text_fields(options: TinyOptions, tokenizer: Tokenizer, *, noise: int) -> dict[str, Any]:
    """The text_config that the options describe, in the released order of keys.

    Raises:
        ConfigError: An override names no field, or one that follows from the tokenizer.
    """
    ratios = _ratios(options)
    layers = len(ratios) if options.layers is None else options.layers
    kv_sources = _default_kv_sources(ratios) if options.kv_sources is None else list(options.kv_sources)
    last_source = kv_sources[-1] if kv_sources else -1
    rope = min(64, options.head_dim // 2)
    text: dict[str, Any] = {
        "model_type": "deepseek_v41_text",
        "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True),
        "hidden_size": options.hidden,
        "moe_intermediate_size": options.hidden // 2
        if options.expert_width is None
        else options.expert_width,
        "num_hidden_layers": layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": 1,
        "head_dim": options.head_dim,
        "qk_rope_head_dim": rope,
        "q_lora_rank": max(32, options.hidden // 4),
        "o_lora_rank": max(32, options.hidden // 4),
        "o_groups": 2 if options.heads % 2 == 0 else 1,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": options.context_length,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": max(1, options.context_length // 16),
        },
        "n_routed_experts": options.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": options.top_k,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": options.window,
        "compress_ratios": [*ratios, *[0] * options.dspark_blocks],
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": kv_sources,
        "index_source_layer_ids": _index_sources(options, kv_sources, ratios),
        "index_n_heads": 4,
        "index_head_dim": max(rope, min(128, options.head_dim)),
        "index_topk": 16,
        "candidate_source_layer_id": last_source
        if options.candidate_source is None
        else options.candidate_source,
        "candidate_topk_blocks": 8,
        "candidate_block_size": 4,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        **_engram(options, layers, tokenizer),
        **_draft(options, layers, noise),
    }
    return _complete_engram(text | _checked(options.overrides, text), options.overrides)


def _ratios(options: TinyOptions) -> list[int]:
    """Two layers of window, then ratio 2, then ratio 1 for the decoder half, as released."""
    if options.ratios is not None:
        return list(options.ratios)
    layers = 8 if options.layers is None else options.layers
    decoder = layers // 2
    return [0 if layer < min(2, layers) else 2 if layer < layers - decoder else 1 for layer in range(layers)]


def _index_sources(options: TinyOptions, kv_sources: list[int], ratios: list[int]) -> list[int]:
    """KV sources, and every second layer after the last of them (so the release re-indexes)."""
    if options.index_sources is not None:
        return list(options.index_sources)
    start = kv_sources[-1] if kv_sources else len(ratios)
    again = [layer for layer in range(start, len(ratios), 2) if ratios[layer]]
    return sorted({*kv_sources, *again})


def _engram(options: TinyOptions, layers: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Before layer 1 and before the end of the encoder half; the release has layers 1 and 14 of 40."""
    ids = options.engram_layers
    if ids is None:
        ids = tuple(sorted({layer for layer in (1, layers // 2 - 1) if 1 <= layer < layers}))
    if not ids:
        return {"engram_layer_ids": [], "engram_num_embeddings": []}
    return {
        "engram_layer_ids": list(ids),
        "engram_num_embeddings": [],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 300,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": compressed_token_map(tokenizer)[1],
    }


def _draft(options: TinyOptions, layers: int, noise: int) -> dict[str, Any]:
    if not options.dspark_blocks:
        return {"num_nextn_predict_layers": 0}
    return {
        "num_nextn_predict_layers": options.dspark_blocks,
        "dspark_block_size": 5,
        "dspark_noise_token_id": noise,
        "dspark_target_layer_ids": list(range(max(0, layers - 3), layers)),
        "dspark_markov_rank": 16,
        "dspark_n_routed_experts": max(1, options.experts // 2),
        "dspark_num_experts_per_tok": max(1, options.top_k // 2),
    }


def _default_kv_sources(ratios: list[int]) -> list[int]:
    """The first layer of every run of one ratio; layers of window between two of them do not end a run."""
    sources, ratio = [], 0
    for layer, own in enumerate(ratios):
        if own and own != ratio:
            sources.append(layer)
            ratio = own
    return sources


def _checked(overrides: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    known = set(TextConfig.model_fields) - {"vocab_size", "engram_compressed_vocab_size"}
    for name in overrides:
        if name in ("vocab_size", "engram_compressed_vocab_size"):
            raise ConfigError(f"{name} follows from the tokenizer: choose its size with --vocab")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see the released config.json"
            raise ConfigError(f'"{name}" is no field of text_config: {hint}')
    return overrides


def _complete_engram(text: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Give every Engram table exactly the rows of its hash buckets, as the release does."""
    names = ("engram_max_ngram_size", "engram_n_heads", "engram_vocab_size")
    sizes = [text.get(name, 0) for name in names]
    if "engram_num_embeddings" in overrides or not all(type(size) is int and size > 0 for size in sizes):
        return text
    if engram_columns(*sizes[:2]) > MAX_COLUMNS:
        return text
    primes = bucket_primes(
        layers=len(text["engram_layer_ids"]), max_ngram=sizes[0], heads=sizes[1], base=sizes[2]
    )
    return text | {"engram_num_embeddings": [sum(table) for table in primes]}
