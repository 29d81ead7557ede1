"""The routing policy as Ray Serve's request router.

Serve runs the router of a pool in every process that holds a handle to it: here, in the gateways. It asks for
candidates for each call and sends the call itself, with its own limits, retries and accounting. Ours answers
with the one replica that `policy/routing.py` chooses by the loads in the process's `PoolView`, or with none,
and then Serve asks again after its back-off (10 ms and rising): the request waits at the gateway.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .tickets import Ticket
from .view import PoolView, view_of


class PolicyRouter(RequestRouter):  # type: ignore[misc]  # Ray is Any to the type checker
    """Routes tickets by policy; any other call (a broadcast has none) goes to whoever is asked first.

    Keyword arguments of the deployment's `request_router_kwargs`: ``pool`` and ``role``.
    """

    view: PoolView

    def initialize_state(self, **kwargs: Any) -> None:
        """See `RequestRouter.initialize_state`."""
        self.view = view_of(kwargs["pool"], kwargs["role"])

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """See `RequestRouter.update_replicas`."""
        super().update_replicas(replicas)
        self.view.replicas({one.replica_id.unique_id: one.replica_metadata for one in replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See `RequestRouter.choose_replicas`."""
        ticket = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if pending_request is None or not isinstance(ticket, Ticket):
            return [candidate_replicas]
        # Without this Serve asks again at once, in a loop that never yields to anything else in the process.
        pending_request.routing_context.should_backoff = True
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        chosen = self.view.choose(ticket, by_name)
        return [] if chosen is None else [[by_name[chosen]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """See `RequestRouter.on_request_routed`."""
        ticket = pending_request.args[0] if pending_request.args else None
        if isinstance(ticket, Ticket):
            self.view.routed(ticket.key, replica_id.unique_id)
