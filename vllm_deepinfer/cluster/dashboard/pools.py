"""Replicas: how many, how busy, how evenly."""

from __future__ import annotations

from .model import POOL, Panel, Query, Row, per_replica
from .queries import increase, rate, share, total

_USED, _FREE = (
    total(f"deepinfer_replica_kv_tokens_{kind}", "pool, replica", POOL) for kind in ("used", "free")
)
_ACTIVE = f"deepinfer_replica_active_requests{{{POOL}}}"

POOLS = Row(
    "Pools",
    (
        Panel(
            "Replicas",
            "Wanted by the autoscaler, answering, and with a ready engine.",
            "short",
            (
                Query(total("deepinfer_pool_target_replicas", "pool", POOL), "{{pool}} wanted"),
                Query(total("deepinfer_pool_replicas", "pool", POOL), "{{pool}} answering"),
                Query(total("deepinfer_replica_ready", "pool", POOL), "{{pool}} ready"),
            ),
        ),
        Panel(
            "Scaling decisions",
            "Per minute; the log says why.",
            "short",
            (
                Query(
                    increase("deepinfer_pool_scaling_decisions_total", "pool, direction", POOL),
                    "{{pool}} {{direction}}",
                ),
            ),
        ),
        Panel(
            "Active requests",
            "Per replica: the decode router keeps these even.",
            "short",
            per_replica("deepinfer_replica_active_requests"),
        ),
        Panel(
            "Queued prompt tokens",
            "Per replica: the prefill router keeps the predicted time for these even.",
            "short",
            per_replica("deepinfer_replica_queued_prompt_tokens"),
        ),
        Panel(
            "KV in use",
            "Share of each replica's KV capacity.",
            "percentunit",
            (Query(share(_USED, f"({_USED} + {_FREE})"), "{{pool}} {{replica}}"),),
            most=1,
        ),
        Panel(
            "Imbalance",
            "The busiest replica's active requests over the mean of its pool: 1 is perfect.",
            "short",
            (Query(f"max by (pool) ({_ACTIVE}) / (avg by (pool) ({_ACTIVE}) > 0)", "{{pool}}"),),
        ),
        Panel(
            "Engine steps",
            "Per second and replica. Active requests and no steps: the engine stands still and is replaced.",
            "short",
            (Query(rate("deepinfer_replica_steps_total", "pool, replica", POOL), "{{pool}} {{replica}}"),),
        ),
        Panel(
            "Prefilled, waiting for decode",
            "Requests whose KV a prefill replica holds for a decode worker.",
            "short",
            per_replica("deepinfer_replica_held_requests"),
        ),
    ),
)
