"""A request router of Ray Serve that follows the policy named in a file: all run on the same replicas."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

from ray.serve.request_router import PendingRequest, RunningReplica

from vllm_deepinfer.bench.routing.policies import OURS, others
from vllm_deepinfer.cluster.application.request_router import PolicyRouter
from vllm_deepinfer.cluster.application.tickets import Ticket
from vllm_deepinfer.engine import HealthState

ROUTER = "vllm_deepinfer.bench.routing.router:ComparedRouter"
POLICY_FILE = "VLLM_DEEPINFER_BENCH_ROUTING"
"""Environment variable: the file's path. Processes that Ray starts inherit it."""


class ComparedRouter(PolicyRouter):
    """Our router, or another policy in its place; view, connections, leases and limits are the same."""

    def initialize_state(self, **kwargs: Any) -> None:
        """See `RequestRouter.initialize_state`."""
        super().initialize_state(**kwargs)
        self._file = Path(os.environ[POLICY_FILE])
        self._others = others(Random(kwargs["pool"]))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See `RequestRouter.choose_replicas`."""
        ticket = pending_request.args[0] if pending_request is not None and pending_request.args else None
        policy = self._file.read_text(encoding="utf-8")
        if policy == OURS or pending_request is None or not isinstance(ticket, Ticket):
            return await super().choose_replicas(candidate_replicas, pending_request)
        pending_request.routing_context.should_backoff = True  # as ours
        members = self.view.members
        able = {
            one.replica_id.unique_id: one
            for one in candidate_replicas
            if one.replica_id.unique_id in members
            and members[one.replica_id.unique_id].engine.health().state is HealthState.READY
        }
        if not able:
            return []
        return [[able[name] for name in self._others[policy](ticket.prefix, list(able))]]
