"""Ray Serve without Ray: its real router with ours in it, over replicas in this process.

Requests take the real token channel over the loopback. What is left out of Serve is its controller (a test
says who runs) and its calls between processes: here a call is a coroutine of the replica that it went to.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Generator
from typing import Any

from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.exceptions import BackPressureError
from ray.serve.request_router import PendingRequest

from vllm_deepinfer.cluster.application.request_router import PolicyRouter
from vllm_deepinfer.cluster.application.tickets import Ticket
from vllm_deepinfer.cluster.channel import EngineServer
from vllm_deepinfer.engine.simulated import SimulatedConfig, SimulatedEngine, chained_tokens
from vllm_deepinfer.policy.step_cost import StepCost

COST = StepCost(per_step=1e-3, per_token=1e-6)
CONFIG = SimulatedConfig(
    cost=COST, max_model_len=512, block_size=16, kv_capacity_tokens=65_536, vocab_size=50_000
)
DEPLOYMENT = DeploymentID("main", "fake")
_ids = itertools.count(1)


class FakeReplica:
    """What Serve has of `EngineReplica`, and ways to break it.

    Attributes:
        full: it rejects Serve's calls. mute: it never answers them, as a process that stands still.
        ongoing: calls that last.
    """

    def __init__(self, name: str, engine: SimulatedEngine, most: int = 512, beat_s: float = 0.05) -> None:
        self.name, self.engine, self.most = name, engine, most
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.server = EngineServer(engine, beat_s=beat_s)
        self.max_ongoing_requests, self.ongoing = most, 0
        self.full = self.mute = False
        self.died = asyncio.Event()
        self.error: Exception = ActorDiedError()
        self.replica_metadata: dict[str, Any] = {}

    async def start(self) -> None:
        await self.engine.start()
        self.replica_metadata = {
            "address": await self.server.start(),
            "most_active": self.most,
            "cost": dataclasses.asdict(COST),
            "layout": "",
        }

    async def get_queue_len(self, *, deadline_s: float) -> int:
        if self.died.is_set():
            raise self.error
        if self.mute:
            await asyncio.Event().wait()
        return self.ongoing

    async def offer(self) -> bool:
        """Serve's rejection protocol: whether it takes a call."""
        await asyncio.sleep(0)
        if self.died.is_set():
            raise self.error
        if self.mute:
            await self.died.wait()
            raise self.error
        return not self.full

    async def lease(self, ticket: Ticket) -> bool:
        self.ongoing += 1
        hold = asyncio.ensure_future(self.server.leases.hold(ticket.key))
        death = asyncio.ensure_future(self.died.wait())
        try:
            await asyncio.wait((hold, death), return_when=asyncio.FIRST_COMPLETED)
            if self.died.is_set():
                raise self.error
            return hold.result()
        finally:
            self.ongoing -= 1
            hold.cancel()
            death.cancel()

    async def kill(self, *, silently: bool = False) -> None:
        """As SIGKILL: no goodbye on the channel. ``silently``: its calls do not notice."""
        for task in self.server._tasks:
            task.cancel()
        await asyncio.gather(*self.server._tasks, return_exceptions=True)
        self.server._context.destroy(linger=0)
        if silently:
            self.mute = True
        else:
            self.died.set()
        await self.engine.close()

    async def close(self) -> None:
        if not self.server._context.closed:
            await self.server.close()
        await self.engine.close()


class FakeServe:
    """One deployment, and the handles to it.

    Attributes:
        replicas: all that were started, by name. listed: those that the controller says are running.
        most_queued: calls that may wait in a handle; None: any number.
    """

    def __init__(self) -> None:
        self.replicas: dict[str, FakeReplica] = {}
        self.listed: list[str] = []
        self.handles: list[FakeHandle] = []
        self.most_queued: int | None = None

    async def add(self, config: SimulatedConfig = CONFIG, most: int = 512, **settings: Any) -> FakeReplica:
        engine = SimulatedEngine(config, tokens=chained_tokens(config.vocab_size))
        replica = FakeReplica(f"r{next(_ids)}", engine, most, **settings)
        await replica.start()
        self.replicas[replica.name] = replica
        self.list(*self.listed, replica.name)
        return replica

    def list(self, *names: str) -> None:
        """The controller tells all routers who runs."""
        self.listed = list(names)
        for handle in self.handles:
            handle.tell()

    def unlist(self, name: str) -> None:
        self.list(*(one for one in self.listed if one != name))

    async def retire(self, name: str) -> None:
        """As Serve's controller stops a replica: unlisted, drained, closed."""
        self.unlist(name)
        while self.replicas[name].ongoing:
            await asyncio.sleep(0.01)
        await self.replicas[name].close()

    def handle(self, pool: str = "main", role: str = "aggregated") -> FakeHandle:
        return FakeHandle(self, pool, role)

    async def close(self) -> None:
        for replica in self.replicas.values():
            await replica.close()


class FakeHandle:
    """`DeploymentHandle`: its router runs in the event loop that uses it."""

    def __init__(self, serve: FakeServe, pool: str, role: str) -> None:
        self._serve, self._pool, self._role = serve, pool, role
        self.router: PolicyRouter | None = None
        self.calls = self.waiting = 0
        self.failing: Exception | None = None

    def _init(self, **options: Any) -> None:
        assert options == {"_run_router_in_separate_loop": False}
        self.router = PolicyRouter(
            DEPLOYMENT,
            DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=True,
            initial_backoff_s=0.005,
            backoff_multiplier=1.5,
            max_backoff_s=0.02,
        )
        self.router.initialize_state(pool=self._pool, role=self._role)
        self._serve.handles.append(self)
        self.tell()

    def tell(self) -> None:
        assert self.router is not None
        self.router.update_replicas([self._serve.replicas[name] for name in self._serve.listed])

    @property
    def lease(self) -> FakeHandle:
        return self

    def remote(self, ticket: Ticket) -> FakeResponse:
        self.calls += 1
        return FakeResponse(asyncio.ensure_future(self._call(ticket)))

    async def _call(self, ticket: Ticket) -> bool:
        """As `AsyncioRouter.assign_request` and what the replica does."""
        router = self.router
        assert router is not None
        if self.failing is not None:
            raise self.failing
        if self._serve.most_queued is not None and self.waiting >= self._serve.most_queued:
            raise BackPressureError(num_queued_requests=self.waiting, max_queued_requests=self.waiting)
        number = str(next(_ids))
        pending = PendingRequest([ticket], {}, RequestMetadata(number, number))
        self.waiting += 1
        try:
            replica = await self._assign(router, pending)
        finally:
            self.waiting -= 1
        router.on_request_routed(pending, replica.replica_id, None)
        try:
            return await replica.lease(ticket)
        except ActorDiedError:
            router.on_replica_actor_died(replica.replica_id)
            raise
        finally:
            router.decrement_queue_len_cache(replica.replica_id)

    async def _assign(self, router: PolicyRouter, pending: PendingRequest) -> FakeReplica:
        retry = False
        while True:
            replica = await router._choose_replica_for_request(pending, is_retry=retry)
            retry = True
            router.on_send_request(replica.replica_id)
            try:
                accepted = await replica.offer()
            except ActorDiedError:
                router.on_replica_actor_died(replica.replica_id)
                continue
            router.on_new_queue_len_info(replica.replica_id, replica.ongoing)
            if accepted:
                return replica


class FakeResponse:
    """`DeploymentResponse`: awaited once, or cancelled."""

    def __init__(self, task: asyncio.Future[bool]) -> None:
        self._task = task

    def __await__(self) -> Generator[Any, None, bool]:
        return self._task.__await__()

    def cancel(self) -> None:
        self._task.cancel()
