"""When a pool grows and shrinks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vllm_deepinfer.recipes.base import NotNegative, Part, Positive, Share


class Autoscaling(Part):
    """Targets of one pool; without any the pool's own measure at its default decides.

    Attributes:
        target_queue_s: prefill and aggregated: predicted seconds that a new request waits for its prefill.
        target_kv_use: decode and aggregated: share of the KV capacity in use.
        target_itl_ms: decode and aggregated: inter-token latency (p99 of the look-back) in milliseconds.
        interval_s: between two decisions. look_back_s: over which loads are averaged.
        upscale_delay_s, downscale_delay_s: how long the need must last.
        hysteresis: share of a target by which it must be missed before anything happens.
        scale_to_zero_after_s: without a request, when replicas.min is 0; None: never below 1.
    """

    target_queue_s: Positive | None = None
    target_kv_use: Share | None = None
    target_itl_ms: Positive | None = None
    interval_s: Positive = 5.0
    look_back_s: Positive = 15.0
    upscale_delay_s: NotNegative = 10.0
    downscale_delay_s: NotNegative = 120.0
    hysteresis: Annotated[float, Field(ge=0, lt=1)] = 0.1
    scale_to_zero_after_s: Positive | None = None
