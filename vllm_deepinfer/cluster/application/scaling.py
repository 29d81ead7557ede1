"""`policy/scaling.py` as an autoscaling policy of Ray Serve. It runs in Serve's controller."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from vllm_deepinfer.policy.scaling import ReplicaMeasure, ScalingSettings, ScalingState, decide
from vllm_deepinfer.recipes.schema import Autoscaling

from . import decisions
from .decisions import ScalingRecord

logger = logging.getLogger("ray.serve")
DEFAULT_QUEUE_S = 2.0
DEFAULT_KV_USE = 0.8
MEASURES = ("queue_s", "kv_use", "itl_ms", "active")


class PoolScaling:
    """Called at Serve's control interval with what the replicas record; see `EngineReplica`.

    Args:
        pool, role: of the recipe. Others: `recipes.scaling.Autoscaling`.
    """

    def __init__(self, pool: str, role: str, **settings: Any) -> None:
        self._pool, self._role = pool, role
        self._wanted = Autoscaling.model_validate(settings)
        self._record: ScalingRecord | None = None

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Serve's protocol: the number of replicas, and what to be told next time."""
        remembered = dict(context.policy_state or {}).get("since", {})
        state = ScalingState(**{key: remembered.get(key) for key in asdict(ScalingState())})
        settings = self.settings(
            context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        )
        now = context.current_time or time.time()
        current = context.target_num_replicas
        measures = measures_of(context.aggregated_metrics or {})
        decision = decide(settings, state, now, current, measures, context.total_queued_requests or 0.0)
        if decision.replicas != current:
            logger.info(
                "Pool %s scales from %d to %d replicas: %s.",
                self._pool,
                current,
                decision.replicas,
                decision.reason,
            )
        self._note(context.app_name or "", current, decision.replicas, decision.reason)
        return decision.replicas, {"since": asdict(decision.state)}

    def settings(self, least: int, most: int) -> ScalingSettings:
        """The recipe's targets; a role without any has a default."""
        wanted = self._wanted
        queue, kv, itl = wanted.target_queue_s, wanted.target_kv_use, wanted.target_itl_ms
        if queue is kv is itl is None:
            queue = DEFAULT_QUEUE_S if self._role != "decode" else None
            kv = DEFAULT_KV_USE if self._role != "prefill" else None
        return ScalingSettings(
            least=least,
            most=most,
            target_queue_s=queue,
            target_kv_use=kv,
            target_itl_ms=itl,
            hysteresis=wanted.hysteresis,
            up_after_s=wanted.upscale_delay_s,
            down_after_s=wanted.downscale_delay_s,
            zero_after_s=wanted.scale_to_zero_after_s,
        )

    def _note(self, application: str, current: int, target: int, reason: str) -> None:
        before = self._record
        if before is None:  # a controller that was restarted goes on counting
            before = decisions.read(application, self._pool) or ScalingRecord(current)
        record = before if target == before.target else before.then(target, reason)
        if record is not self._record:
            decisions.write(application, self._pool, record)
            self._record = record


def measures_of(aggregated: Mapping[str, Mapping[Any, float]]) -> list[ReplicaMeasure]:
    """Serve's metrics, by name and replica, as one measure per replica."""
    replicas = {replica for name in MEASURES for replica in aggregated.get(name, {})}
    return [
        ReplicaMeasure(**{name: float(aggregated.get(name, {}).get(replica, 0.0)) for name in MEASURES})
        for replica in sorted(replicas, key=str)
    ]
