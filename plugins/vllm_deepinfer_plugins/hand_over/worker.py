"""A worker's side of the connector: pledges are posted, reads are checked, none is waited for without end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlConnectorMetadata,
    NixlHandshakePayload,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

from .messages import STUCK, HandOverMetadata, HandOverPayload, HandOverStats, Pledge
from .pledges import PledgeBoard, word_at

logger = init_logger(__name__)
LANDING = 4096
"""Words that may be under way to this worker at once."""
SPIN_S = 0.002
"""How long a word is waited for before the next step has to look: it takes microseconds."""


@dataclass
class _Check:
    """Words under way: (handle, place in the landing array) each, and the number that they must all be."""

    number: int
    reads: list[tuple[Any, int]]


class HandOverWorker(NixlPullConnectorWorker):
    """vLLM's pull worker, whose reads count only if the peer still held what was read."""

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.xfer_stats = HandOverStats()
        settings = vllm_config.kv_transfer_config
        assert settings is not None
        self._fetch_timeout_s = float(settings.get_from_extra_config("fetch_timeout_s", 20.0))
        self._board = PledgeBoard()
        self._landing = np.zeros(LANDING, dtype=np.uint64)
        self._free_landings = list(range(LANDING))
        self._expected: dict[str, Pledge] = {}
        self._checks: dict[str, _Check] = {}
        self._since: dict[str, float] = {}
        self._stuck: set[str] = set()
        self._released: set[str] = set()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        for words in (self._board.words, self._landing):
            place = [(int(words.ctypes.data), words.nbytes, 0, "")]
            descs = self.nixl_wrapper.get_reg_descs(place, "DRAM")
            self.nixl_wrapper.register_memory(descs, backends=self.nixl_backends)
            self._registered_descs.append(descs)
        super().register_kv_caches(whole_blocks(kv_caches))
        self.device_kv_caches = kv_caches
        stock: NixlHandshakePayload | None = self.xfer_handshake_metadata
        assert stock is not None
        self.xfer_handshake_metadata: NixlHandshakePayload | None = HandOverPayload(
            stock.compatibility_hash, stock.agent_metadata_bytes, self._board.address
        )

    # What the scheduler says

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        assert isinstance(metadata, HandOverMetadata)
        for request_id, number in metadata.pledges.items():
            self._board.give(request_id, number)
        self._expected.update(metadata.checks)
        super().start_load_kv(metadata)
        for request_id in metadata.reqs_not_processed:
            self._board.revoke(request_id)
        for request_id in metadata.released & self._reqs_to_send.keys():
            del self._reqs_to_send[request_id]
            self._reqs_to_process.discard(request_id)
            self.consumer_notification_counts_by_req.pop(request_id, None)
            self.expected_consumer_notifications_by_req.pop(request_id, None)
            self._board.revoke(request_id)
            self._released.add(request_id)

    # What it is told

    def get_transfer_results(self) -> KVConnectorTransferResults:
        self._give_up_overdue()
        results = super().get_transfer_results()
        results.finished_sending |= self._released
        self._released = set()
        for request_id in results.finished_sending:
            self._board.fulfil(request_id)
        for request_id in results.finished_recving:
            self._since.pop(request_id, None)
            self._expected.pop(request_id, None)
            self._stuck.discard(request_id)
        return results

    def _reap_expired_send_leases(self, done_sending: set[str]) -> None:
        before = set(self._reqs_to_send)
        super()._reap_expired_send_leases(done_sending)
        for request_id in before - self._reqs_to_send.keys():
            self._board.revoke(request_id)

    # Reads

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        """As vLLM's; a read is done when its pledge has been looked at, too."""
        done, failed = super()._pop_done_transfers(transfers)
        for request_id in done - failed:
            pledge = self._expected.get(request_id)
            if pledge is None or request_id not in self._recving_metadata:
                continue
            done.discard(request_id)
            if not self._begin_check(request_id, pledge):
                failed.add(request_id)
        deadline = time.perf_counter() + SPIN_S
        while self._checks:
            self._poll_checks(done, failed)
            if time.perf_counter() > deadline:
                break
        return done, failed

    def _begin_check(self, request_id: str, pledge: Pledge) -> bool:
        remote = self._recving_metadata[request_id].remote
        assert remote is not None
        check = _Check(pledge.number, [])
        self._checks[request_id] = check
        try:
            for rank in self.tp_mappings[remote.engine_id].all_source_ranks:
                place = self._free_landings.pop()
                self._landing[place] = 0
                address = int(self._landing.ctypes.data) + place * self._landing.itemsize
                there = word_at(pledge.boards[f"0:{rank}"], pledge.number)
                handle = self.nixl_wrapper.initialize_xfer(
                    "READ",
                    self.nixl_wrapper.get_xfer_descs([(address, 8, 0)], "DRAM"),
                    self.nixl_wrapper.get_xfer_descs([(there, 8, 0)], "DRAM"),
                    self._remote_agents[remote.engine_id][(0, rank)],
                )
                check.reads.append((handle, place))
                self.nixl_wrapper.transfer(handle)
        except Exception as error:
            self._log_failure(failure_type="pledge_unreadable", req_id=request_id, error=error)
            return self._end_check(request_id, held=False)
        return True

    def _poll_checks(self, done: set[str], failed: set[str]) -> None:
        for request_id, check in list(self._checks.items()):
            try:
                states = [self.nixl_wrapper.check_xfer_state(handle) for handle, _ in check.reads]
            except Exception:
                states = ["ERR"]
            if "PROC" in states and "ERR" not in states:
                continue
            held = all(self._landing[place] == check.number for _, place in check.reads)
            if not self._end_check(request_id, held and set(states) == {"DONE"}):
                failed.add(request_id)
            done.add(request_id)

    def _end_check(self, request_id: str, held: bool) -> bool:
        for handle, place in self._checks.pop(request_id).reads:
            if self._try_release_xfer_handle(request_id, handle):
                self._free_landings.append(place)  # else something may still arrive there
        if not held:
            self.xfer_stats.record_failed_transfer()
            logger.warning("What %s fetched was no longer held by its prefill engine.", request_id)
        return held

    def _give_up_overdue(self) -> None:
        """Stop reads that last too long. One that cannot be stopped keeps its blocks, and is told."""
        now = time.perf_counter()
        for request_id in list(self._recving_metadata):
            if now - self._since.setdefault(request_id, now) < self._fetch_timeout_s:
                continue
            handles = self._recving_transfers.get(request_id)
            if handles is not None:
                left = [
                    one
                    for one in handles
                    if not self._handle_failed_transfer(request_id, one, self._recv_failures)
                ]
                self._recving_transfers[request_id] = left
                if not left:
                    del self._recving_transfers[request_id]
                    continue
            elif request_id in self._checks:
                self._end_check(request_id, held=False)
                self._recv_failures.add(request_id)
                continue
            if request_id not in self._stuck:
                self._stuck.add(request_id)
                self.xfer_stats.data[STUCK].append(request_id)


def whole_blocks(kv_caches: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Caches that lie in the blocks of one allocation, as those blocks: [blocks, bytes of a block] each.

    Our class's stores have pages of several sizes at the same places of a block, one store per block. vLLM's
    connector takes them for one region as long as the page of the last of them, and would leave the rest of
    the larger ones behind. Seen as whole blocks they are one region of whole blocks.
    """
    caches = list(kv_caches.values())
    storages = {cache.untyped_storage().data_ptr() for cache in caches}
    strides = {cache.stride(0) * cache.element_size() for cache in caches}
    if len(caches) == 1 or len(storages) > 1 or len(strides) > 1:
        return kv_caches
    (stride,), blocks = strides, caches[0].shape[0]
    whole = torch.empty(0, dtype=torch.uint8, device=caches[0].device)
    whole.set_(caches[0].untyped_storage(), 0, (blocks, stride), (stride, 1))
    return dict.fromkeys(kv_caches, whole)
