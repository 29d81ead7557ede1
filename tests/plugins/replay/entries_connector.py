"""A KV connector that knows the entries of documents: in whole blocks or not, at once or a step later."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

DOCUMENTS: dict[tuple[int, ...], dict[int, torch.Tensor]] = {}
"""By document, the entries [rows, channels] of each KV source."""
HITS: dict[str, int] = {}
"""By the request's own id, how many tokens are reported; others get none."""
ASYNC: set[str] = set()


@dataclass
class Loads(KVConnectorMetadata):
    """By request: the blocks of its entries, its document and the tokens to load."""

    loads: list[tuple[str, list[int], tuple[int, ...], int]] = field(default_factory=list)


class EntriesConnector(KVConnectorBase_V1, SupportsHMA):
    """Both roles in one class, as vLLM wants them."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._loads, self._done = Loads(), set[str]()
        groups = kv_cache_config.kv_cache_groups
        self._group = next(i for i, group in enumerate(groups) if group.kv_cache_spec.prefix_cacheable)
        self._layers: Any = None
        self._config = vllm_config

    # scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        name = request.request_id.rsplit("-", 1)[0]
        return max(HITS.get(name, 0) - num_computed_tokens, 0), name in ASYNC

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            ids = tuple(request.all_token_ids)
            count = num_external_tokens
            document = next(known for known in DOCUMENTS if ids[:count] == known[:count])
            table = list(blocks.get_block_ids()[self._group])
            self._loads.loads.append((request.request_id, table, document, num_external_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        loads, self._loads = self._loads, Loads()
        return loads

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    # worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._layers = self._config.compilation_config.static_forward_context

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        for key, table, document, tokens in metadata.loads:
            for layer, entries in DOCUMENTS[document].items():
                store = self._layers[f"layers.{layer}.attn.entries"]
                for row in range(tokens // store.ratio):
                    block, place = divmod(row * store.ratio, store.block_size)
                    store.kv_cache[table[block], place // store.ratio] = entries[row].to(store.dtype)
            if key.rsplit("-", 1)[0] in ASYNC:
                self._done.add(key)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        done, self._done = self._done, set()
        return None, done or None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are done when `start_load_kv` returns."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""
