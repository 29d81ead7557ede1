"""Sizes and settings of a text config that no DeepSeek-V4.1 model has, each refused with one sentence."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from .errors import ConfigError
from .primes import bucket_primes

if TYPE_CHECKING:
    from .text_config import TextConfig

_POSITIVE = (
    *("vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("head_dim", "qk_rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "n_routed_experts"),
    *("num_experts_per_tok", "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "hc_mult"),
    *("hc_sinkhorn_iters", "max_position_embeddings", "rms_norm_eps", "hc_eps", "rope_theta"),
    *("compress_rope_theta", "routed_scaling_factor"),
)
_ENGRAM_SIZES = ("engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_compressed_vocab_size")
_DRAFT_SIZES = (
    "dspark_block_size",
    "dspark_markov_rank",
    "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
)

MAX_EXPERTS, MAX_COLUMNS = 200_000, 4096
"""Routed experts of all layers, hash columns of an Engram layer: above ten times the release's 15,360 and far
above its 24 a config is a slip, and planning its tensors would take the machine's memory or hours."""

# The architecture fixes these; a config that says otherwise describes another model.
_FIXED: dict[str, tuple[Any, str]] = {
    "num_key_value_heads": (1, "all heads share one latent KV"),
    "n_shared_experts": (1, "every layer has one shared expert"),
    "scoring_func": ("sqrtsoftplus", "the router scores with it"),
    "topk_method": ("noaux_tc", "the router's bias moves the selection only"),
    "hidden_act": ("silu", "the experts are clamped SwiGLU"),
    "attention_bias": (False, "the projections have no bias"),
    "tie_word_embeddings": (False, "embed and head are two tensors"),
}


def check_sizes(config: TextConfig) -> None:
    """Raise ConfigError for sizes that contradict the architecture or one another."""
    for name, (wanted, reason) in _FIXED.items():
        value = getattr(config, name)
        if value != wanted:
            raise ConfigError(
                f"text_config.{name} is {_json(value)}: write {_json(wanted)}, because {reason}"
            )
    for name in _POSITIVE:
        _positive(config, name)
    if not config.swiglu_limit >= 0:
        raise ConfigError(
            f"text_config.swiglu_limit is {config.swiglu_limit}: write the clamp, or 0 for none"
        )
    if not 0 <= config.attention_dropout < 1:
        raise ConfigError(
            f"text_config.attention_dropout is {config.attention_dropout}: write a number in [0, 1)"
        )
    if config.num_attention_heads % config.o_groups:
        raise ConfigError(
            f"text_config.o_groups is {config.o_groups}, which does not divide num_attention_heads "
            f"{config.num_attention_heads}: write a divisor"
        )
    rope, limit = config.qk_rope_head_dim, min(config.head_dim, config.index_head_dim)
    if rope % 2 or rope > limit:
        raise ConfigError(
            f"text_config.qk_rope_head_dim is {rope}: write an even number of at most {limit}, the smaller "
            "of head_dim and index_head_dim"
        )
    _at_most(config, "num_experts_per_tok", "n_routed_experts")
    _check_experts(config, "n_routed_experts", config.num_hidden_layers)
    _check_rope_scaling(config.rope_scaling)
    if config.engram_layer_ids or config.engram_num_embeddings:
        check_engram(config)
    if config.num_nextn_predict_layers:
        check_draft(config)


def check_engram(config: TextConfig) -> None:
    """Raise ConfigError unless the Engram tables are complete and large enough for their hash buckets."""
    layers, rows = len(config.engram_layer_ids), config.engram_num_embeddings
    for name in _ENGRAM_SIZES:
        _positive(config, name, " because engram_layer_ids turns Engram on")
    if config.engram_max_ngram_size < 2:
        raise ConfigError(
            f"text_config.engram_max_ngram_size is {config.engram_max_ngram_size}: write 2 or more, because "
            "engram_layer_ids turns Engram on"
        )
    columns = engram_columns(config.engram_max_ngram_size, config.engram_n_heads)
    if columns > MAX_COLUMNS:
        raise ConfigError(
            f"text_config.engram_max_ngram_size {config.engram_max_ngram_size} and engram_n_heads "
            f"{config.engram_n_heads} make {columns} hash columns in a layer: write smaller numbers, so that "
            f"(size - 1) * heads is at most {MAX_COLUMNS}"
        )
    if len(rows) != layers:
        raise ConfigError(
            f"text_config.engram_num_embeddings has {len(rows)} entries for the {layers} layers of "
            "engram_layer_ids: write the number of table rows of each Engram layer"
        )
    if not 0 <= config.engram_pad_token_id < config.vocab_size:
        raise ConfigError(
            f"text_config.engram_pad_token_id is {config.engram_pad_token_id}: write a token id below "
            f"vocab_size {config.vocab_size}"
        )
    for layer, have, primes in zip(config.engram_layer_ids, rows, engram_primes(config), strict=True):
        if have < sum(primes):
            raise ConfigError(
                f"text_config.engram_num_embeddings gives layer {layer} {have} rows, but its hash buckets "
                f"need {sum(primes)}: write at least that, or a smaller engram_vocab_size"
            )


def engram_columns(max_ngram: int, heads: int) -> int:
    """Hash columns of an Engram layer: the heads of every n-gram size from 2 on."""
    return (max_ngram - 1) * heads


def engram_primes(config: TextConfig) -> tuple[tuple[int, ...], ...]:
    """Bucket counts [engram layers][(max_ngram - 1) * heads] of the config's tables."""
    return bucket_primes(
        layers=len(config.engram_layer_ids),
        max_ngram=config.engram_max_ngram_size,
        heads=config.engram_n_heads,
        base=config.engram_vocab_size,
    )


def check_draft(config: TextConfig) -> None:
    """Raise ConfigError unless the DSpark blocks (``num_nextn_predict_layers`` of them) can be built."""
    layers, blocks, taps = (
        config.num_hidden_layers,
        config.num_nextn_predict_layers,
        config.dspark_target_layer_ids,
    )
    if blocks < 0:
        raise ConfigError(
            f"text_config.num_nextn_predict_layers is {blocks}: write the number of DSpark blocks, or 0"
        )
    for name in _DRAFT_SIZES:
        _positive(config, name, " because num_nextn_predict_layers turns DSpark on")
    _at_most(config, "dspark_num_experts_per_tok", "dspark_n_routed_experts")
    _check_experts(config, "dspark_n_routed_experts", blocks)
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= layers:
        raise ConfigError(
            f"text_config.dspark_target_layer_ids is {list(taps)}: write increasing layer ids from 0 to "
            f"{layers - 1}, or set num_nextn_predict_layers to 0 for no drafter"
        )
    if not 0 <= config.dspark_noise_token_id < config.vocab_size:
        raise ConfigError(
            f"text_config.dspark_noise_token_id is {config.dspark_noise_token_id}: write a token id below "
            f"vocab_size {config.vocab_size}"
        )
    drafts = config.compress_ratios[layers : layers + blocks]
    if any(drafts):
        raise ConfigError(
            f"text_config.compress_ratios gives the {blocks} DSpark blocks after layer {layers - 1} the "
            f"ratios {list(drafts)}: write 0 for each, because they have the sliding window alone"
        )


def _check_rope_scaling(scaling: dict[str, Any] | None) -> None:
    if scaling is None:
        raise ConfigError(
            "text_config.rope_scaling is missing: write the YaRN settings of the compressed path, or "
            '{"rope_type": "default"} for none'
        )
    kind = scaling.get("rope_type", scaling.get("type", "yarn"))
    if kind == "default":
        return
    if kind != "yarn":
        raise ConfigError(f'text_config.rope_scaling.rope_type is {_json(kind)}: write "yarn" or "default"')
    for name in ("factor", "original_max_position_embeddings"):
        value = scaling.get(name)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
            or value < 1
        ):
            raise ConfigError(
                f"text_config.rope_scaling.{name} is {_json(value)}: write a number of at least 1"
            )
    for name in ("beta_fast", "beta_slow"):
        value = scaling.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ConfigError(f"text_config.rope_scaling.{name} is {_json(value)}: write a positive number")


def _positive(config: TextConfig, name: str, why: str = "") -> None:
    value = getattr(config, name)
    if not math.isfinite(value) or value <= 0:
        raise ConfigError(f"text_config.{name} is {value}: write a positive number{why}")


def _at_most(config: TextConfig, name: str, limit: str) -> None:
    if getattr(config, name) > getattr(config, limit):
        raise ConfigError(
            f"text_config.{name} is {getattr(config, name)}: write at most {limit} {getattr(config, limit)}"
        )


def _check_experts(config: TextConfig, name: str, layers: int) -> None:
    if getattr(config, name) * layers > MAX_EXPERTS:
        raise ConfigError(
            f"text_config.{name} is {getattr(config, name)} in each of {layers} layers: write at most "
            f"{max(MAX_EXPERTS // layers, 1)}"
        )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
