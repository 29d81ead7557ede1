"""The replica of a pool: an engine, its end of the token channel, and what Ray Serve asks of it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Any

from prometheus_client import REGISTRY, generate_latest
from ray import serve

from vllm_deepinfer.cluster.channel import EngineServer
from vllm_deepinfer.engine import Engine, HealthState
from vllm_deepinfer.policy.step_cost import StepCost, Work

from .engines import engine_of
from .slots import release_slots
from .specs import ReplicaSpec
from .tickets import Ticket

logger = logging.getLogger(__name__)


class EngineReplica:
    """Serve's user class. Requests and tokens take the token channel; Serve's calls are the control plane."""

    async def __init__(self, spec: ReplicaSpec) -> None:  # type: ignore[misc]  # Serve awaits it
        self._spec = spec
        self._engine: Engine = engine_of(spec)
        self.cost: StepCost = getattr(self._engine, "cost", None) or spec.cost
        try:
            await self._engine.start()
        except BaseException:
            await self._engine.close()
            raise
        keys = spec.keys
        self._server = EngineServer(
            self._engine, f"tcp://{spec.host()}:*", keys, beat_s=spec.beat_s, most_active=spec.most_active
        )
        self._address = await self._server.start()
        self._last_steps, self._last_at = 0, asyncio.get_running_loop().time()
        logger.info("Pool %s: a replica serves at %s.", spec.pool, self._address)

    async def lease(self, ticket: Ticket) -> bool:
        """Lasts as long as the request of that key, so that Serve counts it; False if it never came."""
        return await self._server.leases.hold(ticket.key)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Once, when the replica is ready: how gateways reach it. Serve hands it to every router."""
        return {
            "address": self._address,
            "most_active": self._spec.most_active,
            "cost": _plain(self.cost),
            "layout": self._engine.info.kv_layout,
        }

    def measures(self) -> dict[str, Any]:
        """For the application's metrics endpoint; ``text`` is what the engine's own registry shows."""
        load, health, server = self._engine.load(), self._server.health(), self._server
        values = {
            "active_requests": load.active_requests,
            "waiting_requests": load.waiting_requests,
            "queued_prompt_tokens": load.queued_prompt_tokens,
            "held_requests": load.held_requests,
            "kv_tokens_used": load.kv_tokens_used,
            "kv_tokens_free": load.kv_tokens_free,
            "leases": len(server.leases),
            "ready": int(health.state is HealthState.READY),
            "steps": health.steps,
            "sink_failures": health.sink_failures,
            "dropped_sessions": server.dropped_sessions,
            "bad_messages": server.bad_messages,
            "unclaimed_leases": server.leases.unclaimed,
        }
        name = serve.get_replica_context().replica_id.unique_id
        return {"replica": name, "values": values, "text": generate_latest(REGISTRY).decode()}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `policy/scaling.py` goes by; Serve averages it over the look-back."""
        load, now = self._engine.load(), asyncio.get_running_loop().time()
        steps = self._engine.health().steps
        passed, self._last_at = now - self._last_at, now
        made, self._last_steps = steps - self._last_steps, steps
        capacity = load.kv_tokens_used + load.kv_tokens_free
        queued = Work(context=0, prefill_tokens=load.queued_prompt_tokens)
        return {
            "queue_s": self.cost.seconds(self.cost.features(queued)) if load.queued_prompt_tokens else 0.0,
            "kv_use": load.kv_tokens_used / capacity if capacity else 0.0,
            "itl_ms": 1000 * passed / made if made and load.active_requests else 0.0,
            "active": float(load.active_requests),
        }

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises: an engine that died, or stands still with work."""
        health = self._server.health()
        if health.state in (HealthState.DEAD, HealthState.WEDGED):
            raise RuntimeError(f"the engine of pool {self._spec.pool} is {health.state}: {health.detail}")

    async def command(self, name: str, *arguments: Any) -> Any:
        """For tests: reach into a simulated engine, such as ``crash``, ``hang``, ``resume``."""
        if not self._spec.commands:
            raise PermissionError("this pool takes no commands.")
        answer = getattr(self._engine, name)(*arguments)
        return await answer if asyncio.iscoroutine(answer) else answer

    async def __del__(self) -> None:
        """Serve awaits this after the last request, when it stops the replica."""
        await self._server.close()
        await self._engine.close()
        release_slots()


def _plain(cost: StepCost) -> dict[str, Any]:
    return dataclasses.asdict(cost)
