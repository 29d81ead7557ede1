"""The model class that vLLM loads: the backbone over paged stores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger

from vllm_deepinfer.checkpoint.config import TextConfig, V41Config
from vllm_deepinfer.checkpoint.verify import INDEX, SINGLE

from ..draft.blocks import Drafter
from ..draft.load import PREFIX, fill
from ..draft.paged import PagedDrafter, draft_stores
from ..draft.sampling import Block, Draws, draw_block
from ..draft.settle import uses_dspark
from ..kernels import Kernels, suspended
from ..kernels.prepare import load_or_warn
from ..settings import Settings
from .backbone import Backbone
from .hashes import engram_hash
from .native import NativePagedSequence, has_kernels_for
from .packing import pack
from .paged import PagedSequence, Stores
from .quant import CACHE_DTYPE
from .sequence import Store
from .stores import Hits, PagedStore, window_kind
from .tiles import ROWS, RowTiles
from .truncation import Truncation
from .weights import load_into
from .whole import WholeSequences

logger = init_logger(__name__)

PROFILE_TOKENS = 256
"""Rows of the plain form that a run without caches (memory profiling) goes through."""


class DeepseekV41ForCausalLM(nn.Module):
    """DeepSeek-V4.1's language model in portable PyTorch, under vLLM's block manager.

    Text only; tensor and pipeline parallelism, LoRA and other cache data types are refused by `config_hook`.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = V41Config.from_dict(vllm_config.model_config.hf_config.to_dict()).text_config
        self.config, self.dtype = config, vllm_config.model_config.dtype
        settings = Settings.read(vllm_config.additional_config)
        self.tiles = RowTiles(ROWS if settings.invariant else None)
        self._wants_kernels = settings.native_kernels
        self._kernels: Kernels | None = None
        self.backbone = Backbone(config, engram_hash(vllm_config.model_config), self.dtype)
        path, replayed = f"{prefix}." if prefix else "", settings.encoder_replay is True
        self.stores = make_stores(vllm_config, config, path, replayed=replayed)
        self.drafter = Drafter(config, self.dtype) if uses_dspark(vllm_config) else None
        if self.drafter is not None:
            own = draft_stores(vllm_config, config, path, replayed=replayed)
            self.stores = Stores({**self.stores.tokens, **own}, self.stores.entries)
            self._drafting = PagedDrafter(self.drafter, own, self.tiles)
            self.backbone.tap = self._drafting.tap
        # Modules, so that vLLM and a caller that lists modules see the stores.
        self._paged = nn.ModuleList([*self.stores.tokens.values(), *self.stores.entries.values()])
        self._ready = False
        # vLLM would read every safetensors file of a folder without an index, also those that are no weights.
        folder = Path(vllm_config.model_config.model)
        alone = (folder / SINGLE).is_file() and not (folder / INDEX).is_file()
        self.allow_patterns_overrides = [SINGLE] if alone else None

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token embeddings [tokens, hidden]."""
        return nn.functional.embedding(input_ids, self.backbone.embed.weight)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        truncation: Truncation | None = None,
        lookback: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Hidden states [tokens, hidden] of one engine step; the last two arguments as of `PagedSequence`."""
        if inputs_embeds is not None:
            raise ValueError(
                "this DeepSeek-V4.1 class is text only: send token ids, not embeddings or images"
            )
        if not self._ready:
            self._prepare(input_ids.device)
        # Kernels are on for a whole process, in which another engine may have asked for them.
        with suspended() if self._kernels is None else nullcontext():
            return self._forward(input_ids, positions, truncation, lookback)

    def _forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        truncation: Truncation | None,
        lookback: torch.Tensor | None,
    ) -> torch.Tensor:
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            return self._profile(input_ids)
        ours = {store.prefix: metadata[store.prefix] for store in self._paged}
        tokens = next(iter(ours.values())).tokens
        sequence = self._sequence(positions[:tokens].long(), ours, truncation, lookback)
        hidden: torch.Tensor = self.backbone(input_ids[:tokens], sequence)
        return hidden if tokens == len(input_ids) else _pad(hidden, len(input_ids))

    def _prepare(self, device: torch.device) -> None:
        """Pack the weights, once all are there: real ones and vLLM's dummy ones come in different ways."""
        self._ready = True
        if self.tiles.rows is not None or self.dtype != torch.bfloat16 or device.type != "cpu":
            return
        self._kernels = load_or_warn() if self._wants_kernels else None
        pack(self.backbone, self._kernels)
        if self.drafter is not None:
            pack(self.drafter, self._kernels)

    def _sequence(self, positions: torch.Tensor, *step: Any) -> PagedSequence:
        parts = (self.config, positions, self.tiles, self.stores, *step)
        if self._kernels is None or not has_kernels_for(self.config):
            return PagedSequence(*parts)
        return NativePagedSequence(*parts, kernels=self._kernels)

    def _profile(self, input_ids: torch.Tensor) -> torch.Tensor:
        """A run without caches: the plain form over the first rows, zeros behind them."""
        ids = input_ids[:PROFILE_TOKENS]
        sequence = WholeSequences(self.config, 1, len(ids), ids.device)
        return _pad(self.backbone(ids, sequence), len(input_ids))

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Float32 logits [tokens, vocab]."""
        if not len(hidden_states):
            return hidden_states.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        logits: torch.Tensor = self.tiles(self.backbone.logits, hidden_states)
        return logits

    def draft(
        self,
        requests: torch.Tensor,
        anchors: torch.Tensor,
        positions: torch.Tensor,
        count: int,
        draws: Draws,
    ) -> Block:
        """Drafts after the last step; arguments as of `PagedDrafter.hidden` and `draw_block`."""
        assert self.drafter is not None, "this engine was not started with the drafter"
        with suspended() if self._kernels is None else nullcontext():
            hidden = self._drafting.hidden(requests, anchors, positions, self.backbone.embed.weight)
            blocks = hidden.unflatten(0, (len(anchors), -1))
            logits = self.compute_logits(blocks[:, :count].flatten(0, 1)).unflatten(0, (len(anchors), -1))
            return draw_block(self.drafter, blocks, logits, anchors, count, self.tiles, draws)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill the model from released tensors; returns the names of the filled parameters."""
        kept: list[tuple[str, torch.Tensor]] = []
        filled = {
            f"backbone.{name}" for name in load_into(self.backbone, self._apart(weights, kept), self.dtype)
        }
        if self.drafter is not None:
            filled |= {f"drafter.{name}" for name in fill(self.drafter, kept)}
        return filled

    def _apart(
        self, weights: Iterable[tuple[str, torch.Tensor]], kept: list[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights without the drafter's, which go into ``kept`` if there is one."""
        for name, tensor in weights:
            if not name.startswith(PREFIX):
                yield name, tensor
            elif self.drafter is not None:
                kept.append((name, tensor))


def make_stores(vllm_config: Any, config: TextConfig, prefix: str = "", *, replayed: bool = False) -> Stores:
    """The paged arrays of a model, registered with vLLM.

    Args:
        vllm_config: Of the engine: the block size and the layer registry.
        prefix: Of the layer names.
        replayed: Window KV is rebuilt after a prefix hit, so that only the entries are cached: Engram then
            needs a lookback.
    """
    tokens: dict[tuple[Store, int], PagedStore] = {}
    entries: dict[int, PagedStore] = {}
    size, depth = config.head_dim, config.engram_max_ngram_size

    def store(name: str, channels: int, dtype: torch.dtype, **kind: Any) -> PagedStore:
        return PagedStore(vllm_config, f"{prefix}layers.{name}", channels, dtype, **kind)

    if any(plan.engram is not None for plan in config.schedule()) and not replayed:
        tokens[Store.IDS, 0] = store("0.ids", 1, torch.int32, window=depth)
    window = window_kind(config, replayed=replayed)
    for plan in config.schedule():
        at = f"{plan.index}.attn"
        tokens[Store.WINDOW, plan.index] = store(f"{at}.window", size, CACHE_DTYPE, **window)
        if plan.owns_kv:
            channels = size + config.index_head_dim
            entries[plan.index] = store(f"{at}.entries", channels, CACHE_DTYPE, ratio=plan.ratio)
        if plan.owns_kv and plan.ratio > 1:
            hits = Hits.NEVER if replayed else Hits.CACHED
            pool = {"window": plan.ratio, "hits": hits}
            tokens[Store.POOL, plan.index] = store(f"{at}.pool", 2 * size, torch.float32, **pool)
    return Stores(tokens, entries)


def _pad(hidden: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat((hidden, hidden.new_zeros(rows - len(hidden), hidden.shape[1])))
