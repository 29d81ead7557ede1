"""The scheduler's side of the connector: which holds there are, and which requests fetch."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import time
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from .messages import (
    FAILED,
    PLEDGE,
    RELEASE,
    RELEASED,
    HandOverMetadata,
    HandOverPayload,
    HandOverStats,
    Pledge,
)

PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"


class HandOverScheduler(NixlPullConnectorScheduler):
    """vLLM's, and more: the last position is always left to the decode engine, holds have numbers and can be
    released, and what ends is told.

    An engine with holds or fetches and nothing to compute steps all the time, to see what has arrived; the
    setting ``idle_poll_s`` is the pause between two such steps, beside vLLM's millisecond.

    Attributes:
        stats: events since they were last taken.
    """

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        if PORT not in os.environ:
            self.side_channel_port = _free_port(self.side_channel_host)
        self.stats = HandOverStats()
        settings = vllm_config.kv_transfer_config
        assert settings is not None
        self._idle_poll_s = float(settings.get_from_extra_config("idle_poll_s", 0.0))
        self._numbers = itertools.count(
            secrets.randbits(48) + 1
        )  # those of an earlier engine never come again
        self._boards: dict[str, int] = {}
        self._pledges: dict[str, int] = {}  # of requests that will be held, until they have ended
        self._new_pledges: dict[str, int] = {}
        self._to_release: set[str] = set()

    def set_xfer_handshake_metadata(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        for (pp_rank, tp_rank), payload in metadata.items():
            assert isinstance(payload, HandOverPayload)
            self._boards[f"{pp_rank}:{tp_rank}"] = payload.board
        super().set_xfer_handshake_metadata(metadata)

    def _prefill_backoff(self) -> int:
        """At least one token. The decode engine computes the last position itself, to sample after it; a
        prefill engine that had computed it, too, would have given up the oldest token of its sliding windows.
        """
        return max(1, int(super()._prefill_backoff()))

    def on_new_request(self, request: Request) -> None:
        self._to_release.update((request.kv_transfer_params or {}).get(RELEASE, ()))
        super().on_new_request(request)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode") and request.request_id not in self._pledges:
            # With the first chunk: it stands before the request can end.
            number = next(self._numbers)
            self._pledges[request.request_id] = self._new_pledges[request.request_id] = number
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        held, params = super().request_finished(request, block_ids)
        number = self._pledges.pop(request.request_id, None)
        if held and params is not None and number is not None:
            params[PLEDGE] = Pledge(number, self._boards).as_params()
        return held, params

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        checks = {
            request_id: pledge
            for request_id, (request, _, _, awaited) in self._reqs_need_recv.items()
            if awaited and (pledge := Pledge.of(request.kv_transfer_params or {})) is not None
        }
        stock = super().build_connector_meta(scheduler_output)
        assert isinstance(stock, NixlConnectorMetadata)
        metadata = HandOverMetadata(stock)
        metadata.checks = checks
        metadata.pledges, self._new_pledges = self._new_pledges, {}
        metadata.released, self._to_release = self._to_release, set()
        news = metadata.reqs_to_recv or metadata.reqs_to_send or metadata.released
        if not scheduler_output.total_num_scheduled_tokens and not news:
            time.sleep(self._idle_poll_s)
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        self.stats.data[RELEASED] += connector_output.finished_sending or ()
        self.stats.data[FAILED] += connector_output.failed_recving or ()

    def has_pending_push_work(self) -> bool:
        """Keeps an engine that is idle otherwise stepping until its workers have been told."""
        return bool(self._to_release) or super().has_pending_push_work()


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
