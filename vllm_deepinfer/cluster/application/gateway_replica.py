"""A gateway as a Serve replica: it listens on a port of its own; Serve places, watches and replaces it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Mapping
from typing import Any

import uvicorn

from vllm_deepinfer.engine import Engine
from vllm_deepinfer.errors import UserError
from vllm_deepinfer.gateway import logs
from vllm_deepinfer.gateway.app import GatewayApp
from vllm_deepinfer.gateway.building import build_app
from vllm_deepinfer.gateway.limits.keys import KeyRing
from vllm_deepinfer.gateway.serve import GRACE_S, calm_garbage_collection, listen
from vllm_deepinfer.gateway.starting import answers_503
from vllm_deepinfer.gateway.streaming.lane import LaneProtocol
from vllm_deepinfer.policy.retention import Retention
from vllm_deepinfer.recipes.checkpoints import ensure_checkpoint
from vllm_deepinfer.recipes.schema import Recipe

from .pool_counts import PoolCounts
from .serve_pool import ServePool
from .specs import GatewaySpec

logger = logging.getLogger(__name__)
LONGEST_STALL_S = 300.0
"""A stream whose replica was lost ends with an error when none has taken it for so long."""


class GatewayReplica:
    """Serve's user class. The gateway has a thread and an event loop of its own."""

    async def __init__(self, spec: GatewaySpec, pools: Mapping[str, Any]) -> None:  # type: ignore[misc]
        self._spec, self._handles = spec, pools
        self._stop = threading.Event()
        self._failure: str | None = None
        self._app: GatewayApp | None = None
        self._loop: asyncio.AbstractEventLoop
        self._url = ""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ready, self._serve_loop = ready, asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._thread.start()
        await ready

    def record_replica_metadata(self) -> dict[str, Any]:
        """Where it listens."""
        return {"url": self._url}

    async def url(self) -> str:
        """Where it listens."""
        return self._url

    async def check_health(self) -> None:
        """Serve replaces the gateway when this raises."""
        if self._failure or not self._thread.is_alive():
            raise RuntimeError(f"the gateway has stopped: {self._failure or 'its thread ended'}.")

    async def drain(self) -> bool:
        """Admit nothing more; return when what runs has ended, or the drain timeout is over. For the stop of
        the whole application: the requests here need the pools until their end."""
        if self._app is None:
            return True
        draining = asyncio.run_coroutine_threadsafe(self._app.drain(), self._loop)
        return await asyncio.wrap_future(draining)

    async def __del__(self) -> None:
        """Serve awaits this when it stops the replica: running answers end within the drain timeout."""
        self._stop.set()
        await asyncio.to_thread(self._thread.join)

    # In the gateway's thread

    def _run(self) -> None:
        try:
            with _runner() as runner:
                runner.run(self._main())
        except BaseException as error:
            self._failure = str(error) or type(error).__name__
            logger.exception("The gateway has ended.")
            self._tell(error)

    def _tell(self, error: BaseException | None) -> None:
        def tell() -> None:
            if not self._ready.done():
                if error is None:
                    self._ready.set_result(None)
                else:
                    self._ready.set_exception(RuntimeError(str(error)))

        self._serve_loop.call_soon_threadsafe(tell)

    async def _main(self) -> None:
        recipe = self._spec.whole
        door = recipe.gateway
        logs.configure(door.log_level)
        folder = await asyncio.to_thread(ensure_checkpoint, recipe)
        pools = pools_of(recipe, self._handles, self._spec)
        with _listener(door.host, door.port, door.per_node) as listener:
            engine = engine_over(recipe, pools)
            try:
                async with answers_503(listener):
                    await asyncio.gather(*(pool.start() for pool in pools.values()))
                    if engine not in pools.values():
                        await engine.start()
                keys = KeyRing.load(door.api_keys) if door.api_keys else KeyRing()
                classes = Retention() if recipe.store is None else recipe.store.retention
                settings = door.settings(recipe.served_names, classes)
                app = build_app(engine, recipe.model.tokenizer or folder, settings, keys)
                app.own_engine = False
                app.core.metrics.registry.register(
                    PoolCounts(pools, getattr(engine, "counts", None) if len(pools) > 1 else None)
                )
                host, port = listener.getsockname()[:2]
                self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
                self._app, self._loop = app, asyncio.get_running_loop()
                calm_garbage_collection()
                server = uvicorn.Server(
                    uvicorn.Config(
                        app,
                        loop="none",
                        http=LaneProtocol,
                        log_level="warning",
                        access_log=False,
                        server_header=False,
                        timeout_graceful_shutdown=round(door.drain_timeout_s) + GRACE_S,
                    )
                )
                serving = asyncio.ensure_future(server.serve(sockets=[listener]))
                while not server.started and not serving.done():
                    await asyncio.sleep(0.01)
                self._tell(None)
                stopped = asyncio.ensure_future(asyncio.to_thread(self._stop.wait))
                await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
                with contextlib.suppress(Exception):
                    await app.drain()
                server.should_exit = True
                self._stop.set()
                await serving
            finally:
                await engine.close()
                for pool in pools.values():
                    await pool.close()


def pools_of(recipe: Recipe, handles: Mapping[str, Any], spec: GatewaySpec) -> dict[str, ServePool]:
    """This process's pools, not started."""
    gateway, health = secrets.token_hex(6), recipe.ray.health
    return {
        name: ServePool(
            name,
            pool.role,
            handles[name],
            gateway=gateway,
            keys=spec.keys,
            may_be_empty=pool.replicas.min == 0,
            start_s=recipe.ray.deadlines.start_s,
            stale_load_s=health.stale_load_s,
            mark_s=health.mark_s,
            patience_s=_patience_s(recipe),
        )
        for name, pool in recipe.pools.items()
    }


def engine_over(recipe: Recipe, pools: Mapping[str, ServePool]) -> Engine:
    """What the gateway stands on: the one aggregated pool, or prefill and decode together."""
    by_role = {pool.role: pools[name] for name, pool in recipe.pools.items()}
    if "aggregated" in by_role:
        return by_role["aggregated"]
    from vllm_deepinfer.cluster.disaggregated import DisaggregatedEngine

    return DisaggregatedEngine(
        by_role["prefill"], by_role["decode"], shortest=_shortest(recipe), patience_s=_patience_s(recipe)
    )


def _shortest(recipe: Recipe) -> int:
    """Through a store a prompt of less than a run does not reach the decode pool."""
    store = recipe.store if recipe.transfer.kind == "store" else None
    return (store.run_tokens or 0) if store is not None else 0


def _patience_s(recipe: Recipe) -> float:
    """Where a pool has one replica, what it had goes on when the next one has started."""
    return min(max(recipe.ray.deadlines.start_s, 60.0), LONGEST_STALL_S)


def _listener(host: str, port: int, count: int) -> Any:
    """The first free port of the gateways' own."""
    if port == 0:
        return listen(host, 0)
    for at in range(port, port + count):
        try:
            return listen(host, at)
        except UserError:
            if at == port + count - 1:
                raise
    raise AssertionError("no port was tried")


def _runner() -> asyncio.Runner:
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)
