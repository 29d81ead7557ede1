"""The connector as vLLM loads it: `kv_connector` NixlConnector, `kv_connector_module_path` this module.

It bears vLLM's name because vLLM asks for that name where it fixes a configuration for NIXL.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPullConnector
from vllm.v1.kv_cache_interface import KVCacheConfig

from .messages import HandOverStats
from .scheduler import HandOverScheduler
from .worker import HandOverWorker


class NixlConnector(NixlPullConnector):
    """vLLM's pull connector with our two sides."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = HandOverScheduler(vllm_config, self.engine_id, kv_cache_config)
        else:
            self.connector_worker = HandOverWorker(vllm_config, self.engine_id, kv_cache_config)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if isinstance(self.connector_scheduler, HandOverScheduler):
            stats = self.connector_scheduler.stats
            return None if stats.is_empty() else stats.clone_and_reset()
        return super().get_kv_connector_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return HandOverStats() if data is None else HandOverStats(data=data)
