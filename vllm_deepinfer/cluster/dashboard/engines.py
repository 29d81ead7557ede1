"""What vLLM engines say of themselves; empty with simulated ones."""

from __future__ import annotations

from .model import POOL, Panel, Query, Row
from .queries import quantile, rate, share, total

ENGINES = Row(
    "vLLM engines",
    (
        Panel(
            "Step duration",
            "Measured and predicted by the cost model, 99th percentile per pool (time-budget scheduler).",
            "s",
            tuple(
                Query(quantile(0.99, f"deepinfer_step_{kind}_seconds", "pool", POOL), f"{{{{pool}}}} {kind}")
                for kind in ("actual", "predicted")
            ),
        ),
        Panel(
            "Error of the cost model",
            "Median of |predicted - actual| / actual over the last steps.",
            "percentunit",
            (
                Query(
                    f"max by (pool, replica) (deepinfer_step_cost_error_median{{{POOL}}})",
                    "{{pool}} {{replica}}",
                ),
            ),
        ),
        Panel(
            "Steps over budget",
            "Per second and pool.",
            "short",
            (Query(rate("deepinfer_steps_over_budget_total", "pool", POOL), "{{pool}}"),),
        ),
        Panel(
            "Preemptions",
            "Per second and pool: KV is short, and work is done twice.",
            "short",
            (Query(rate("vllm:num_preemptions_total", "pool", POOL), "{{pool}}"),),
        ),
        Panel(
            "Prefix cache",
            "Share of looked-up tokens that an engine's own prefix cache held.",
            "percentunit",
            (
                Query(
                    share(
                        rate("vllm:prefix_cache_hits_total", "pool", POOL),
                        rate("vllm:prefix_cache_queries_total", "pool", POOL),
                    ),
                    "{{pool}}",
                ),
            ),
            most=1,
        ),
        Panel(
            "Parts that are missing",
            "Engines that run without a part that they were to have, such as compiled kernels; the log "
            "says how to "
            "get it back.",
            "short",
            (Query(total("deepinfer_fallbacks_total", "pool, part", POOL), "{{pool}} {{part}}"),),
        ),
    ),
    engines=True,
)
