"""Which KV-cache groups a run consists of, and how many of its blocks each contributes.

| group | stored of a run |
|---|---|
| full attention, MLA (also compressed, several tokens per row) | every block |
| sliding window that vLLM caches by prefix | the blocks that a continuation at the run's end can still see |
| sliding window under bounded replay (`prefix_cacheable` False) | nothing: replay rebuilds it |
| recurrent state, chunked local, cross attention | the engine refuses to start |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_deepinfer.errors import UserError

TARGET_BYTES = 1 << 20
MAX_RUN_TOKENS = 512


@dataclass(frozen=True)
class StoredGroup:
    """One group of a run.

    Attributes:
        index: Its place in vLLM's block tables.
        block_size: Tokens per block.
        window: Tokens of a sliding window, None for all.
        layers: Names, in the order in which their pages are stored.
        page_bytes: Bytes of a block per layer.
    """

    index: int
    block_size: int
    window: int | None
    layers: tuple[str, ...]
    page_bytes: tuple[int, ...]

    def blocks(self, run_tokens: int) -> int:
        """Blocks at the end of a run that are stored."""
        whole = run_tokens // self.block_size
        return whole if self.window is None else min(whole, math.ceil((self.window - 1) / self.block_size))

    def nbytes(self, run_tokens: int) -> int:
        """Bytes of a run."""
        return self.blocks(run_tokens) * sum(self.page_bytes)


def stored_groups(config: KVCacheConfig) -> tuple[StoredGroup, ...]:
    """The groups of a model that are stored.

    Raises:
        UserError: a group whose state cannot be stored by runs of blocks.
    """
    found = []
    for index in config.prefix_cacheable_group_ids:
        group = config.kv_cache_groups[index]
        spec = group.kv_cache_spec
        specs = [_layer_spec(spec, layer) for layer in group.layer_names]
        windows = {_window(one) for one in specs}
        if len(windows) != 1:
            raise UserError("The prefix store cannot hold a KV-cache group that mixes windows.")
        found.append(
            StoredGroup(
                index,
                spec.block_size,
                windows.pop(),
                tuple(group.layer_names),
                tuple(one.page_size_bytes for one in specs),
            )
        )
    if not found:
        raise UserError("This model has no KV that is cached by prefix; start it without the prefix store.")
    return tuple(found)


def _layer_spec(spec: KVCacheSpec, layer: str) -> Any:
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _window(spec: Any) -> int | None:
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window)
    if isinstance(spec, FullAttentionSpec) and not isinstance(spec, RSWASpec | SinkFullAttentionSpec):
        return None
    raise UserError(
        f"The prefix store cannot hold KV of the kind {type(spec).__name__}; start this model without it."
    )


def choose_run_tokens(groups: tuple[StoredGroup, ...], wanted: int | None) -> int:
    """Tokens per object: about a MiB of KV, in whole blocks of every group, at most 512 tokens.

    Longer runs read faster and lose more at their end (half a run per request on average); see the
    measurement in `vllm_deepinfer/store/README.md`.

    Raises:
        UserError: the wanted length is not a multiple of every block size.
    """
    step = math.lcm(*(group.block_size for group in groups))
    if wanted is not None:
        if wanted % step:
            raise UserError(f"run_tokens is {wanted}; write a multiple of {step}, the model's KV block size.")
        return wanted
    per_step = sum(g.nbytes(step) for g in groups if g.window is None) or sum(g.nbytes(step) for g in groups)
    steps = max(1, min(TARGET_BYTES // max(1, per_step), MAX_RUN_TOKENS // step))
    return step * (1 << (steps.bit_length() - 1))
