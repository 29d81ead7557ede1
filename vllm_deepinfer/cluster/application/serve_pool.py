"""A pool behind Ray Serve as one engine: Serve chooses the replica, the token channel carries the request.

Each attempt of a request is one Serve call, `EngineReplica.lease`. Serve's router (ours, in this process)
picks the replica, Serve sends the call there under its limits; then the request itself goes to that replica
over the token channel, and the call returns when it has ended. A call that fails is the first news of a
replica's death, sooner than the silence of the channel. All else is `PooledEngine`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from vllm_deepinfer.cluster.channel import ChannelKeys, RemoteEngine
from vllm_deepinfer.cluster.pool import PooledEngine
from vllm_deepinfer.engine import (
    EngineDead,
    EngineError,
    EngineInfo,
    EngineUnavailable,
    GenerateRequest,
    Health,
    HealthState,
    InvalidRequest,
    Load,
    Overloaded,
)
from vllm_deepinfer.engine.validation import check_request
from vllm_deepinfer.policy.routing import Choice, Marks, Staleness
from vllm_deepinfer.policy.step_cost import AttentionBound, StepCost

from .tickets import Ticket, prefix_of
from .view import Member, forget_view, view_of

logger = logging.getLogger(__name__)
JOIN_AGAIN_S = 1.0
"""Until a replica that did not answer, and that Serve still lists, is connected to again."""

WAKE_S = 1.0
"""Until a pool that may be empty is taken to be."""
PAUSE_S = 0.05
"""Between two attempts to place a request that nobody could take."""


class _Lease:
    """Serve's call for one attempt of a request, and whom it went to."""

    call: asyncio.Task[None]

    def __init__(self, key: str, attempt: str, routed: asyncio.Future[str]) -> None:
        self.key, self.attempt, self.routed = key, attempt, routed

    @property
    def worker(self) -> str:
        """The replica that has taken it; "": none yet."""
        return self.routed.result() if self.routed.done() and not self.routed.cancelled() else ""


class ServePool(PooledEngine):
    """One pool.

    Args:
        name, role: the pool's.
        handle: Serve's handle to its deployment, not used yet: its router then runs in this event loop.
        gateway: names this process among all gateways.
        keys: of the token channel.
        reserve: tokens of output that a request without ``max_tokens`` is reckoned with.
        may_be_empty: whether the pool scales to zero; then a request may wait for a replica to start.
        start_s: time for the first replica to appear.
        room_s: how long a new request waits for room, or for a replica to start from zero.
        patience_s: how long one whose replica was lost waits for another.
    """

    def __init__(
        self,
        name: str,
        role: str,
        handle: Any,
        *,
        gateway: str,
        keys: ChannelKeys | None = None,
        reserve: int = 256,
        may_be_empty: bool = False,
        start_s: float = 60.0,
        stale_load_s: float = 2.0,
        mark_s: float = 5.0,
        attempts: int = 5,
        room_s: float = 60.0,
        patience_s: float = 60.0,
    ) -> None:
        super().__init__({}, _no_router, attempts=attempts, patience_s=patience_s)
        self.name, self.view = name, view_of(name, role)
        self.view.staleness, self.view.marks = Staleness(stale_load_s), Marks(mark_s)
        self._handle, self._gateway, self._keys = handle, gateway, keys
        self._reserve, self._may_be_empty, self._start_s = reserve, may_be_empty, start_s
        self._room_s = room_s
        self._known_info = EngineInfo(model=name, max_model_len=0)
        self._members: dict[str, Member] = {}
        self._joins: dict[str, asyncio.Task[None]] = {}
        self._retry_at: dict[str, float] = {}
        self._leaving: set[str] = set()
        self._closings: set[asyncio.Task[None]] = set()
        self._leases: dict[str, _Lease] = {}
        self._numbers = itertools.count(1)

    @property
    def info(self) -> EngineInfo:
        """The pool's; while it has no replica, as it last was."""
        if self._workers:
            self._known_info = super().info
        return self._known_info

    async def start(self) -> None:
        """Connect to the replicas. Raises: EngineDead when none comes in time."""
        self.view.changed = self._membership
        self._handle._init(_run_router_in_separate_loop=False)  # the router and this pool share a loop
        await super().start()
        began, waking = self._now(), None
        try:
            while not self._workers:
                waited = self._now() - began
                if waited > self._start_s:
                    await self.close()
                    raise EngineDead(f"no replica of pool {self.name} answered within {self._start_s:g} s.")
                if waking is None and self._may_be_empty and not self.view.wanted and waited > WAKE_S:
                    # Scaled to zero: a call that waits lets Serve start one, and that one says what it is.
                    waking = self._handle.lease.remote(Ticket(f"{self._gateway}/0", prompt_tokens=1))
                await asyncio.sleep(0.05)
        finally:
            if waking is not None:
                waking.cancel()

    def health(self) -> Health:
        """See `PooledEngine.health`; a pool that scales to zero is READY without a replica."""
        health = super().health()
        if health.state is HealthState.DEAD and self._may_be_empty and not self._workers and not self._closed:
            return Health(state=HealthState.READY, detail="The pool is scaled to zero.")
        return health

    async def submit(self, request: GenerateRequest, sink: Any) -> None:
        """See `Engine.submit`."""
        if self.info.max_model_len:  # better refused before it is routed
            check_request(request, self.info)
        await super().submit(request, sink)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """See `Engine.abort`; also of what Serve has yet to route."""
        ids = list(request_ids)
        routing = {self._live[one].attempt for one in ids if one in self._live and not self._live[one].worker}
        if routing:
            for lease in [one for one in self._leases.values() if one.attempt in routing]:
                lease.call.cancel()
        await super().abort(ids)

    async def close(self) -> None:
        """See `Engine.close`; also the connections, which are the pool's own."""
        await super().close()
        self.view.changed = lambda: None
        forget_view(self.name)
        pending = [*self._joins.values(), *(lease.call for lease in self._leases.values())]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, *self._closings, return_exceptions=True)
        await asyncio.gather(*(engine.close() for engine in self._workers.values()))
        router = getattr(self._handle, "_router", None)
        if router is not None:  # `shutdown_async` takes a router of this loop for one of another (Ray 2.60)
            with contextlib.suppress(Exception):
                await router.shutdown()
        self._workers.clear()
        self._members.clear()
        self.view.members.clear()

    # Members

    def _membership(self) -> None:
        """Bring the connections to what Serve says; it tells of changes, and `_watch` repeats it."""
        wanted, now = self.view.wanted, self.view.clock()
        for name in set(wanted) - set(self._workers) - set(self._joins):
            if now >= self._retry_at.get(name, 0.0):
                self._joins[name] = asyncio.ensure_future(self._join(name, wanted[name]))
        for name in set(self._joins) - set(wanted):
            self._joins.pop(name).cancel()
        # One that Serve drains still ends what it has; one that died is seen by its silence or its calls.
        self._leaving = set(self._workers) - set(wanted)
        self._retry_at = {name: at for name, at in self._retry_at.items() if name in wanted}
        self.view.members = {name: one for name, one in self._members.items() if name in wanted}

    async def _join(self, name: str, metadata: Mapping[str, Any]) -> None:
        bound = AttentionBound(**metadata["cost"]["attention"])
        cost = StepCost(**{**metadata["cost"], "attention": bound})
        engine = RemoteEngine(metadata["address"], self._keys)
        try:
            await engine.start()
            self.add(name, engine)
        except BaseException as error:
            await engine.close()
            if not isinstance(error, EngineError):
                raise
            self.counts["not_joined"] += 1
            self._retry_at[name] = self.view.clock() + JOIN_AGAIN_S
            logger.warning("Replica %s of pool %s is not used: %s", name, self.name, error)
            return
        finally:
            if self._joins.get(name) is asyncio.current_task():
                del self._joins[name]
        self._members[name] = Member(engine, cost, metadata["most_active"])
        self._membership()

    async def _watch(self) -> None:
        watching = asyncio.ensure_future(super()._watch())
        try:
            while True:
                await asyncio.sleep(self._watch_s)
                self._membership()
                for lease in [self._leases[key] for key in self.view.stuck() if key in self._leases]:
                    lease.call.cancel()
                for name in list(self._leaving):
                    engine = self._workers[name]
                    idle = all(live.worker != name for live in self._live.values())
                    if idle or engine.health().state is HealthState.DEAD:
                        self._gone(name)
        finally:
            watching.cancel()

    def _gone(self, worker: str) -> None:
        """A replica has left, or its process has died: its requests need not wait for the silence.

        One that Serve still lists is connected to again: it may only have been out of reach.
        """
        engine = self._workers.get(worker)
        if engine is None:
            return
        self._retry_at[worker] = self.view.clock() + JOIN_AGAIN_S
        self._members.pop(worker, None)
        self.view.members.pop(worker, None)
        self.view.forget(worker)
        self._leaving.discard(worker)
        self.remove(worker)
        closing = asyncio.ensure_future(engine.close())
        self._closings.add(closing)
        closing.add_done_callback(self._closings.discard)

    # Placing

    async def _place(self, live: Any) -> None:
        """Hand a request to a replica. Raises: what the last one that was asked raised."""
        refused: dict[str, EngineError] = {}
        deadline = self._now() + (self._patience_s if live.losses else self._room_s)
        while True:
            request = live.next_attempt()
            self._by_attempt[live.attempt] = live
            lease = self._ask(request, frozenset(refused))
            try:
                worker = await self._routed(lease, deadline)
                engine = self._workers.get(worker)
                if engine is None:
                    raise EngineUnavailable(f"replica {worker} of pool {self.name} has just gone.")
                live.worker, live.placing = worker, True
                await engine.submit(request, self._deliver, lease.key)  # type: ignore[call-arg]
            except BaseException as error:
                self._abandon(live, request, lease)
                if not isinstance(error, EngineError) or isinstance(error, InvalidRequest):
                    raise
                if live.request.request_id not in self._live:
                    return  # aborted meanwhile
                worker, live.worker = live.worker, ""
                await asyncio.sleep(self._pause(worker, error, refused, deadline))
                continue
            finally:
                live.placing = False
            self.view.settle(lease.key)
            self._placed(live, request)
            if self._live.get(live.request.request_id) is not live:  # aborted meanwhile
                await engine.abort([request.request_id])
            return

    def _pause(
        self, worker: str, error: EngineError, refused: dict[str, EngineError], deadline: float
    ) -> float:
        """Seconds until the next attempt. Raises: when nobody else is left to ask, or the time is over."""
        late = self._now() >= deadline
        if not worker:  # nobody was asked
            if late or isinstance(error, (Overloaded, EngineDead)):
                raise error
            return PAUSE_S
        self.counts["refusals"] += 1
        self.view.marks.mark(worker, self.view.clock())
        again = worker in refused
        refused[worker] = error
        full = {one for one, why in refused.items() if isinstance(why, Overloaded)}
        if late or (full and (again or full >= set(self.view.members))):
            raise self._nowhere(refused, any_serving=True)
        return PAUSE_S if again else 0.0

    def _ask(self, request: GenerateRequest, avoid: frozenset[str]) -> _Lease:
        """Call Serve for one attempt of a request."""
        room = max(self.info.max_model_len - len(request.prompt_token_ids), 1)
        limit = request.sampling.max_tokens
        fetched = request.hand_over is not None and request.hand_over.source is not None
        ticket = Ticket(
            key=f"{self._gateway}/{next(self._numbers)}",
            prompt_tokens=len(request.prompt_token_ids),
            output_tokens=min(self._reserve if limit is None else min(limit, self._reserve), room),
            computed_tokens=len(request.prompt_token_ids) if fetched else 0,
            avoid=avoid,
            prefix=prefix_of(request.prompt_token_ids),
        )
        lease = _Lease(ticket.key, request.request_id, self.view.expect(ticket.key))
        lease.call = asyncio.ensure_future(self._call(lease, ticket))
        self._leases[ticket.key] = lease
        lease.call.add_done_callback(lambda call: self._ended(lease, call))
        return lease

    def _ended(self, lease: _Lease, call: asyncio.Task[None]) -> None:
        del self._leases[lease.key]
        if not call.cancelled():
            call.exception()  # `_routed` has raised it, or nobody waits for it any more

    async def _routed(self, lease: _Lease, deadline: float) -> str:
        """The replica that Serve has given the request to."""
        wait = max(deadline - self._now(), 0.0)
        await asyncio.wait((lease.routed, lease.call), return_when=asyncio.FIRST_COMPLETED, timeout=wait)
        if lease.worker:
            return lease.worker
        if lease.call.done():
            error = None if lease.call.cancelled() else lease.call.exception()
            raise error if isinstance(error, EngineError) else EngineUnavailable("it was not routed.")
        raise Overloaded(f"no replica of pool {self.name} had room for {wait:.2g} s.")

    async def _call(self, lease: _Lease, ticket: Ticket) -> None:
        """Serve's call: lasts as long as the request. What it raises is news of the replica."""
        response = self._handle.lease.remote(ticket)
        try:
            await response
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                response.cancel()
            raise
        except BackPressureError as error:
            raise Overloaded(f"pool {self.name} has as many requests waiting as it may: {error}") from None
        except DeploymentUnavailableError:
            raise EngineDead(f"pool {self.name} has failed, and Ray Serve does not restart it.") from None
        except (RayTaskError, TaskCancelledError) as error:
            # The replica lives. What runs there goes on, uncounted by Serve.
            self.counts["calls_failed"] += 1
            logger.warning("A lease of pool %s failed: %s", self.name, error)
            raise EngineUnavailable(f"pool {self.name} did not take the request: {error}.") from None
        except (RayError, RayServeException) as error:
            why = type(error).__name__
            if lease.worker in self._workers:
                self.counts["calls_lost"] += 1
                logger.warning("Replica %s of pool %s is lost (%s).", lease.worker, self.name, why)
                self._gone(lease.worker)
            raise EngineUnavailable(f"pool {self.name} lost the request's replica: {why}.") from None

    def _abandon(self, live: Any, request: GenerateRequest, lease: _Lease) -> None:
        """The attempt came to nothing."""
        self._by_attempt.pop(request.request_id, None)
        self.view.settle(lease.key)
        lease.call.cancel()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _no_router(request: GenerateRequest, loads: Mapping[str, Load], refused: frozenset[str]) -> Choice | None:
    raise AssertionError("a ServePool is routed by Serve")
