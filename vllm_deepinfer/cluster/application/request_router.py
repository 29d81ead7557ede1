"""The routing policy as Ray Serve's request router.

Serve runs the router of a pool in every process that holds a handle to it: here, in the gateways. It asks for
candidates for each call and sends the call itself, with its own limits, retries and accounting. Ours answers
with the one replica that `policy/routing.py` chooses by the loads in the process's `PoolView`, or with none,
and then Serve asks again after its back-off (10 ms and rising): the request waits at the gateway.

A ticket is sent as a plain call. Serve's own protocol makes each call a stream whose first item says whether
the replica has room, half of what a call costs the gateway; here the view knows the room, and the token
channel, on which the request itself follows, refuses what is beyond it (`EngineServer`'s ``most_active``).
"""

from __future__ import annotations

from typing import Any

from ray.serve._private.common import ReplicaQueueLengthInfo, RunningReplicaInfo
from ray.serve._private.replica_result import ActorReplicaResult
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .tickets import Ticket
from .view import PoolView, view_of


class _Taken(ActorReplicaResult):  # type: ignore[misc]  # Ray is Any to the type checker
    """A plain call's result, which Serve takes for accepted."""

    queue: ReplicaQueueLengthInfo

    async def get_rejection_response(self) -> ReplicaQueueLengthInfo:
        """See `ActorReplicaResult.get_rejection_response`."""
        return self.queue


class _Open(RunningReplica):  # type: ignore[misc]
    """A replica that is sent its tickets as plain calls."""

    view: PoolView

    def try_send_request(self, pr: PendingRequest, with_rejection: bool) -> Any:
        """See `RunningReplica.try_send_request`."""
        # Serve's other transport, gRPC, has results of another class.
        plain = bool(pr.args) and isinstance(pr.args[0], Ticket) and pr.metadata._by_reference
        result = super().try_send_request(pr, with_rejection=with_rejection and not plain)
        if plain and with_rejection:
            result.__class__ = _Taken  # made by Serve's wrapper, which has no place to say which class
            result.queue = ReplicaQueueLengthInfo(True, self.view.ongoing(self.replica_id.unique_id))
        return result


class PolicyRouter(RequestRouter):  # type: ignore[misc]  # Ray is Any to the type checker
    """Routes tickets by policy; any other call (a broadcast has none) goes to whoever is asked first.

    Keyword arguments of the deployment's `request_router_kwargs`: ``pool`` and ``role``.
    """

    view: PoolView

    def initialize_state(self, **kwargs: Any) -> None:
        """See `RequestRouter.initialize_state`."""
        self.view = view_of(kwargs["pool"], kwargs["role"])

    def create_replica_wrapper(self, replica_info: RunningReplicaInfo) -> RunningReplica:
        """See `RequestRouter.create_replica_wrapper`."""
        replica = _Open(replica_info)
        replica.view = self.view
        return replica

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
