"""Who owns and who reads the compressed caches: one plan per layer, and the schedules that cannot run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import ConfigError

if TYPE_CHECKING:
    from .text_config import TextConfig


@dataclass(frozen=True)
class LayerPlan:
    """What one backbone layer owns and what it reads.

    Attributes:
        index: The layer's position in the stack.
        ratio: Tokens per compressed position in the cache that the layer reads; 0 is the sliding window
            alone.
        kv_source: The layer whose compressed cache and index keys this layer reads; None for ratio 0.
        index_source: The layer whose selection of compressed positions this layer uses; None for ratio 0.
        owns_kv: The layer has a compressor, a compressed cache and index keys.
        owns_index: The layer has an indexer and selects anew.
        is_candidate_source: The layer's indexer publishes the candidate blocks.
        uses_candidates: The layer's indexer scores inside the published candidate blocks only.
        engram: Position in ``engram_layer_ids`` when an Engram lookup precedes the layer, else None.
    """

    index: int
    ratio: int
    kv_source: int | None
    index_source: int | None
    owns_kv: bool
    owns_index: bool
    is_candidate_source: bool
    uses_candidates: bool
    engram: int | None


def plan_layers(config: TextConfig) -> tuple[LayerPlan, ...]:
    """One plan per backbone layer of a config that ``check_schedule`` has passed."""
    return tuple(_plan(config, layer) for layer in range(config.num_hidden_layers))


def _plan(config: TextConfig, layer: int) -> LayerPlan:
    ratio, candidate = config.compress_ratios[layer], config.candidate_source_layer_id
    owns_index = layer in config.index_source_layer_ids
    return LayerPlan(
        index=layer,
        ratio=ratio,
        kv_source=_latest(config.kv_source_layer_ids, layer) if ratio else None,
        index_source=_latest(config.index_source_layer_ids, layer) if ratio else None,
        owns_kv=layer in config.kv_source_layer_ids,
        owns_index=owns_index,
        is_candidate_source=layer == candidate,
        uses_candidates=owns_index and 0 <= candidate < layer,
        engram=config.engram_layer_ids.index(layer) if layer in config.engram_layer_ids else None,
    )


def _latest(sources: Sequence[int], layer: int) -> int | None:
    return max((source for source in sources if source <= layer), default=None)


def check_schedule(config: TextConfig) -> None:
    """Raise ConfigError for a layer schedule that no forward pass can follow.

    Ids beyond ``num_hidden_layers`` are legal while ``compress_ratios`` covers them: a model cut to its first
    layers keeps the schedule, and with it the hashing and sharing identities, of the whole.
    """
    _check_ratios(config)
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        _check_ids(name, getattr(config, name), len(config.compress_ratios))
    stray = sorted(set(config.kv_source_layer_ids) - set(config.index_source_layer_ids))
    if stray:
        raise ConfigError(
            f"text_config.kv_source_layer_ids lists layer {stray[0]}, which index_source_layer_ids does "
            "not: every KV source selects for itself, so add it there"
        )
    _check_owners(config)
    _check_candidates(config)


def _check_ratios(config: TextConfig) -> None:
    ratios, layers = config.compress_ratios, config.num_hidden_layers
    if len(ratios) < layers:
        raise ConfigError(
            f"text_config.compress_ratios has {len(ratios)} entries for {layers} layers: write one ratio "
            "per layer"
        )
    for layer, ratio in enumerate(ratios):
        if ratio < 0:
            raise ConfigError(
                f"text_config.compress_ratios[{layer}] is {ratio}: write 0 for the sliding window alone, or "
                "the number of tokens per compressed position"
            )


def _check_ids(name: str, ids: Sequence[int], covered: int) -> None:
    for layer in ids:
        if not 0 <= layer < covered:
            raise ConfigError(
                f"text_config.{name} lists layer {layer}: write ids from 0 to {covered - 1}, which "
                "compress_ratios covers"
            )
    if list(ids) != sorted(set(ids)):
        raise ConfigError(f"text_config.{name} is {list(ids)}: write each layer once, in increasing order")


def _check_owners(config: TextConfig) -> None:
    owner: int | None = None
    for layer, ratio in enumerate(config.compress_ratios[: config.num_hidden_layers]):
        if ratio == 0:
            for name in ("kv_source_layer_ids", "index_source_layer_ids"):
                if layer in getattr(config, name):
                    raise ConfigError(
                        f"text_config.{name} lists layer {layer}, whose compress_ratios entry is 0: a layer "
                        "with the sliding window alone has no compressed cache, so give it a ratio or drop "
                        "it from the list"
                    )
            continue
        if layer in config.kv_source_layer_ids:
            owner = layer
        if owner is None:
            raise ConfigError(
                f"text_config.kv_source_layer_ids has no layer at or before {layer}, which compress_ratios "
                f"says reads a cache of ratio {ratio}: list the layer that owns that cache, or write ratio 0"
            )
        if config.compress_ratios[owner] != ratio:
            raise ConfigError(
                f"text_config.compress_ratios[{layer}] is {ratio}, but the layer reads the cache of KV "
                f"source {owner}, whose ratio is {config.compress_ratios[owner]}: write that ratio, or list "
                f"layer {layer} in kv_source_layer_ids and index_source_layer_ids"
            )


def _check_candidates(config: TextConfig) -> None:
    source = config.candidate_source_layer_id
    if source == -1:
        return
    if source not in config.kv_source_layer_ids:
        raise ConfigError(
            f"text_config.candidate_source_layer_id is {source}, which is no KV source: write one of "
            f"{list(config.kv_source_layer_ids)}, or -1 for no candidate filter"
        )
    for name in ("candidate_topk_blocks", "candidate_block_size"):
        if getattr(config, name) <= 0:
            raise ConfigError(
                f"text_config.{name} is {getattr(config, name)}: write a positive number, or set "
                "candidate_source_layer_id to -1 for no candidate filter"
            )
    for layer in config.index_source_layer_ids:
        if (
            source < layer < config.num_hidden_layers
            and config.compress_ratios[layer] != config.compress_ratios[source]
        ):
            raise ConfigError(
                f"text_config.candidate_source_layer_id is {source}, but index source {layer} after it has "
                f"ratio {config.compress_ratios[layer]}, not {config.compress_ratios[source]}, and cannot "
                "use its blocks: write a later source, or equal ratios from the candidate source on"
            )
