"""What went wrong and was made up for."""

from __future__ import annotations

from .model import GATEWAY, POOL, Panel, Query, Row
from .queries import increase, rate, total

FAILURES = Row(
    "Failures and fallbacks",
    (
        Panel(
            "Pool events",
            "Routed again, continued elsewhere, refused, chosen by a stale load, marked as overloaded; "
            "per second.",
            "short",
            (Query(rate("deepinfer_pool_events_total", "pool, event", POOL) + " > 0", "{{pool}} {{event}}"),),
        ),
        Panel(
            "Hand-over events",
            "Between prefill and decode pool, per second.",
            "short",
            (Query(rate("deepinfer_hand_over_events_total", "event", GATEWAY) + " > 0", "{{event}}"),),
        ),
        Panel(
            "Connected replicas",
            "Replicas that each gateway sends to: fewer than answering means a broken channel.",
            "short",
            (
                Query(
                    total("deepinfer_pool_connected_replicas", "pool, gateway", POOL),
                    "{{pool}} at {{gateway}}",
                ),
            ),
        ),
        Panel(
            "Token channel",
            "Per minute: gateways dropped, bad messages, requests that did not come, receivers that raised.",
            "short",
            tuple(
                Query(increase(f"deepinfer_replica_{name}_total", "pool", POOL), f"{{{{pool}}}} {text}")
                for name, text in (
                    ("dropped_sessions", "gateways dropped"),
                    ("bad_messages", "bad messages"),
                    ("unclaimed_leases", "requests that did not come"),
                    ("sink_failures", "receivers that raised"),
                )
            ),
        ),
        Panel(
            "Missing from this dashboard",
            "Per minute: processes that did not answer when they were asked for their metrics.",
            "short",
            (Query("increase(deepinfer_scrape_failures_total[1m])", "no answer"),),
        ),
    ),
)
