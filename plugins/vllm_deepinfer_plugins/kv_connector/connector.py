"""`PrefixStoreConnector`: vLLM's KV connector interface, handed on to the two halves."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from vllm_deepinfer.store.prefix_store import PrefixStore
from vllm_deepinfer.store.stats import StoreStats
from vllm_deepinfer.store.sweeper import Sweeper
from vllm_deepinfer.store.uri import open_store

from .fingerprint import engine_fingerprint, shards
from .groups import choose_run_tokens, stored_groups
from .metadata import StoreMetadata
from .pages import PagedKV
from .scheduler_side import SchedulerSide
from .settings import read_settings
from .stats import StoreConnectorStats, StorePromMetrics
from .worker_side import WorkerSide


class PrefixStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Saves every whole run of KV after it is computed and loads it in any engine, for as long as it is kept.

    Raises:
        UserError: a setting, a model or a way of parallelism that the store cannot serve.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = self._kv_transfer_config
        self._settings = read_settings(transfer.kv_connector_extra_config, transfer.kv_load_failure_policy)
        self._groups = stored_groups(kv_cache_config)
        self._shards = shards(vllm_config, kv_cache_config)
        self._run_tokens = choose_run_tokens(self._groups, self._settings.run_tokens)
        self._stats = StoreStats()
        self._backend = open_store(self._settings.store, self._stats)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = self._scheduler_side(vllm_config, kv_cache_config)

    def _scheduler_side(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> SchedulerSide:
        transfer, mode = self._kv_transfer_config, self._settings.mode
        return SchedulerSide(
            self._settings,
            PrefixStore(self._backend, self._stats),
            self._groups,
            self._run_tokens,
            engine_fingerprint(
                vllm_config, kv_cache_config, self._groups, self._run_tokens, self._settings.weights_id
            ),
            shards=self._shards,
            ranks=vllm_config.parallel_config.world_size,
            num_blocks=kv_cache_config.num_blocks,
            reads=bool(transfer.is_kv_consumer) and mode != "write",
            writes=bool(transfer.is_kv_producer) and mode != "read",
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss later, nothing else."""
        return False

    # ── worker ──

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config = self._kv_cache_config
        kv = PagedKV(self._groups, kv_caches, config.num_blocks, self._run_tokens)
        rank = get_tp_group().rank_in_group
        replicas = config.kv_tp_replicas
        settings, stats = self._settings, self._stats
        store = PrefixStore(self._backend, stats, zstd_level=settings.zstd_level, on_full=self._on_full)
        sweeper = Sweeper(self._backend, settings.capacity_bytes, settings.retention, stats)
        self._worker = WorkerSide(
            settings,
            store,
            kv,
            shard=rank // replicas,
            writes=rank % replicas == 0,
            sweeper=sweeper if rank == 0 else None,
        )

    def _on_full(self) -> None:
        if self._worker is not None:
            self._worker.sweep_soon()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._submit(saves=False)

    def wait_for_save(self) -> None:
        """The step's forward pass has been issued: start its saves, and wait for none."""
        self._submit(saves=True)

    def _submit(self, saves: bool) -> None:
        meta = self._get_connector_metadata()
        assert isinstance(meta, StoreMetadata)
        if self._worker is not None:
            self._worker.submit(meta, saves)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults() if self._worker is None else self._worker.results()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self.get_transfer_results(finished_req_ids).finished_recving

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return None if self._worker is None else self._worker.saves_done()

    # ── scheduler ──

    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None, "a method of the scheduler's half was called in a worker"
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._side().pool = gpu_block_pool

    def on_new_request(self, request: Request) -> None:
        self._side().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._side().matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._side().after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._side().build_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._side().update(connector_output)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._side().finished(request, block_ids)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_push_work(self) -> bool:
        return self._side().holds_blocks

    # ── both ──

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        stats = StoreConnectorStats(data=self._stats.take())
        if self._worker is not None:
            stats.data["gauges"] = self._worker.gauges
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return StoreConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return StorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        self._backend.close()
