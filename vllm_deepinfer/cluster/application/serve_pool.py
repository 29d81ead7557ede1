"""A pool behind Ray Serve as one engine: Serve chooses the replica, the token channel carries the request.

Each attempt of a request is one Serve call, `EngineReplica.lease`. Serve's router (ours, in this process)
picks the replica, Serve sends the call there under its limits; then the request itself goes to that replica
over the token channel, and the call returns when it has ended. A call that fails is the first news of a
replica's death, sooner than the silence of the channel. All else is `PooledEngine`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from ray.exceptions import RayError
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

from .tickets import Ticket
from .view import Member, forget_view, view_of

logger = logging.getLogger(__name__)


class ServePool(PooledEngine):
    """One pool.

    Args:
        name, role: the pool's.
        handle: Serve's handle to its deployment, not used yet: its router then runs in this event loop.
        gateway: names this process among all gateways.
        keys: of the token channel.
        reserve: tokens of output that a request without ``max_tokens`` is reckoned with.
        may_be_empty: whether the pool scales to zero; then a request may wait for a replica to start.
        start_s: time for the first replica to appear, and for one to start from zero.
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
        patience_s: float = 60.0,
    ) -> None:
        super().__init__({}, _no_router, attempts=attempts, patience_s=patience_s)
        self.name, self.view = name, view_of(name, role)
        self.view.staleness, self.view.marks = Staleness(stale_load_s), Marks(mark_s)
        self._handle, self._gateway, self._keys = handle, gateway, keys
        self._reserve, self._may_be_empty, self._start_s = reserve, may_be_empty, start_s
        self._known_info = EngineInfo(model=name, max_model_len=0)
        self._joining: set[str] = set()
        self._leaving: set[str] = set()
        self._calls: dict[str, Any] = {}

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
        deadline = asyncio.get_running_loop().time() + self._start_s
        while not self._workers:
            if asyncio.get_running_loop().time() > deadline:
                await self.close()
                raise EngineDead(f"no replica of pool {self.name} answered within {self._start_s:g} s.")
            await asyncio.sleep(0.05)

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
        routing = [self._live[one] for one in ids if one in self._live and not self._live[one].worker]
        await super().abort(ids)
        for live in routing:
            call = self._calls.get(f"{self._gateway}/{live.attempt}")
            if call is not None:
                call.cancel()

    async def close(self) -> None:
        """See `Engine.close`; also the connections, which are the pool's own."""
        await super().close()
        self.view.changed = lambda: None
        forget_view(self.name)
        await asyncio.gather(*(engine.close() for engine in self._workers.values()))
        self._workers.clear()
        self.view.members.clear()

    # Members

    def _membership(self) -> None:
        """Serve has told of other replicas than before."""
        for name in set(self.view.wanted) - set(self._workers) - self._joining:
            self._joining.add(name)
            self._spawn(self._join(name, self.view.wanted[name]))
        # One that Serve drains still ends what it has; one that died is seen by its silence or its calls.
        self._leaving = set(self._workers) - set(self.view.wanted)
        for name in self._leaving:
            self.view.members.pop(name, None)

    async def _join(self, name: str, metadata: Mapping[str, Any]) -> None:
        engine = RemoteEngine(metadata["address"], self._keys)
        try:
            await engine.start()
            self.add(name, engine)
        except EngineError as error:
            logger.warning("Replica %s of pool %s is not used: %s", name, self.name, error)
            await engine.close()
            self.counts["not_joined"] += 1
            self._joining.discard(name)
            return
        self._joining.discard(name)
        bound = AttentionBound(**metadata["cost"]["attention"])
        cost = StepCost(**{**metadata["cost"], "attention": bound})
        if name in self.view.wanted:
            self.view.members[name] = Member(engine, cost, metadata["most_active"])
        else:
            self._leaving.add(name)

    async def _watch(self) -> None:
        watching = asyncio.ensure_future(super()._watch())
        try:
            while True:
                await asyncio.sleep(self._watch_s)
                for name in list(self._leaving):
                    engine = self._workers.get(name)
                    idle = all(live.worker != name for live in self._live.values())
                    if engine is None or idle or engine.health().state is HealthState.DEAD:
                        self._leaving.discard(name)
                        self.view.ledger.drop(name)
                        self.remove(name)
                        if engine is not None:
                            await engine.close()
        finally:
            watching.cancel()

    # Placing

    async def _place(self, live: Any) -> None:
        """Hand a request to a replica. Raises: what the last one that was asked raised."""
        refused: dict[str, EngineError] = {}
        while True:
            request = live.next_attempt()
            key = f"{self._gateway}/{live.attempt}"
            self._by_attempt[live.attempt] = live
            try:
                worker = await self._lease(live, request, key, frozenset(refused))
                engine = self._workers.get(worker)
                if engine is None:
                    raise EngineUnavailable(f"replica {worker} has just gone.")
                live.worker, live.placing = worker, True
                await engine.submit(request, self._deliver, key)  # type: ignore[call-arg]
            except InvalidRequest:
                self._abandon(live, request, key)
                raise
            except EngineError as error:
                self._abandon(live, request, key)
                if live.request.request_id not in self._live:
                    return  # aborted meanwhile
                if not live.worker:  # Serve did not find one
                    raise
                self.counts["refusals"] += 1
                self.view.marks.mark(live.worker, self.view.clock())
                refused[live.worker] = error
                live.worker = ""
                if len(refused) >= max(len(self._workers), 2):
                    raise self._nowhere(refused, any_serving=True) from None
                continue
            except BaseException:
                self._abandon(live, request, key)
                raise
            finally:
                live.placing = False
            self.view.settle(key)
            self._placed(live, request)
            if self._live.get(live.request.request_id) is not live:  # aborted meanwhile
                await engine.abort([request.request_id])
            return

    async def _lease(self, live: Any, request: GenerateRequest, key: str, avoid: frozenset[str]) -> str:
        """The replica that Serve has given the request to."""
        limit = request.sampling.max_tokens
        fetched = request.hand_over is not None and request.hand_over.source is not None
        ticket = Ticket(
            key=key,
            prompt_tokens=len(request.prompt_token_ids),
            output_tokens=self._reserve if limit is None else min(limit, self._reserve),
            computed_tokens=len(request.prompt_token_ids) if fetched else 0,
            avoid=avoid,
        )
        routed = self.view.expect(key)
        call = asyncio.ensure_future(self._call(live, request.request_id, ticket))
        call.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen below, or not needed
        self._calls[key] = call
        await asyncio.wait((routed, call), return_when=asyncio.FIRST_COMPLETED, timeout=self._patience_s)
        if routed.done() and not routed.cancelled():
            return routed.result()
        if call.done():
            error = None if call.cancelled() else call.exception()
            raise error if isinstance(error, EngineError) else EngineUnavailable("it was not routed.")
        raise Overloaded(f"no replica of pool {self.name} had room for {self._patience_s:g} s.")

    async def _call(self, live: Any, attempt: str, ticket: Ticket) -> None:
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
        except (RayError, RayServeException, DeploymentUnavailableError) as error:
            if live.attempt == attempt and live.worker:
                self.counts["calls_lost"] += 1
                logger.warning(
                    "Replica %s of pool %s is lost (%s).", live.worker, self.name, type(error).__name__
                )
                self._gone(live.worker)
            raise EngineUnavailable(
                f"pool {self.name} lost the request's replica: {type(error).__name__}."
            ) from None
        finally:
            self._calls.pop(ticket.key, None)

    def _gone(self, worker: str) -> None:
        """A replica's process has died: its requests need not wait for the silence."""
        self.view.members.pop(worker, None)
        engine = self._workers.get(worker)
        self.remove(worker)
        if engine is not None:
            self._spawn(engine.close())

    def _abandon(self, live: Any, request: GenerateRequest, key: str) -> None:
        """The attempt came to nothing."""
        self._by_attempt.pop(request.request_id, None)
        self.view.settle(key)
        call = self._calls.pop(key, None)
        if call is not None and not call.done():
            call.cancel()


def _no_router(request: GenerateRequest, loads: Mapping[str, Load], refused: frozenset[str]) -> Choice | None:
    raise AssertionError("a ServePool is routed by Serve")
