"""A KV connector that loads prefixes asynchronously: its KV is a constant, it arrives a few steps later."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

LOADED = 128  # tokens of every prompt that is longer
STEPS = 3  # calls of the worker after which a load is there


@dataclass
class Loads(KVConnectorMetadata):
    """Request ids and the blocks to fill."""

    blocks: dict[str, list[int]] = field(default_factory=dict)


class SlowConnector(KVConnectorBase_V1):
    """Both roles in one class, as vLLM wants them."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._loads = Loads()
        self._asked: set[str] = set()
        self._due: dict[str, int] = {}
        self._caches: dict[str, Any] = {}

    # scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if request.request_id in self._asked or request.num_tokens <= LOADED or num_computed_tokens:
            return 0, False
        return LOADED, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._asked.add(request.request_id)
            self._loads.blocks[request.request_id] = list(blocks.get_block_ids()[0])

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        loads, self._loads = self._loads, Loads()
        return loads

    # worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        for request_id, blocks in metadata.blocks.items():
            self._due[request_id] = STEPS
            for cache in self._caches.values():
                for block in blocks:
                    cache[block] = 0.01

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._due = {key: left - 1 for key, left in self._due.items()}
        done = {key for key, left in self._due.items() if left <= 0}
        for key in done:
            del self._due[key]
        return None, done or None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All of it is there when `get_finished` says so."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""
