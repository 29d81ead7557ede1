"""The routing policy over live engines: loads as the engines report them, costs by StepCost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from vllm_deepinfer.engine import GenerateRequest, Load
from vllm_deepinfer.policy.routing import (
    Choice,
    DecodeCost,
    DecodeLoad,
    Ledger,
    PrefillLoad,
    choose_aggregated,
)
from vllm_deepinfer.policy.step_cost import StepCost, Work


class AggregatedRouter:
    """For engines that do prefill and decode: the soonest first token, among those with room for the KV.

    Args:
        cost: Of a step on one of these engines.
        most_active: Requests per engine.
        reserve: Tokens of output that a request without ``max_tokens`` is reckoned with.
        clock: Seconds.
    """

    def __init__(
        self,
        cost: StepCost,
        *,
        most_active: int = 1 << 30,
        reserve: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cost, self._most_active, self._reserve, self._clock = cost, most_active, reserve, clock
        self._decode = DecodeCost(max(cost.per_decode, 1e-9), cost.per_decode_context)
        self._ledger = Ledger()

    def __call__(
        self, request: GenerateRequest, loads: Mapping[str, Load], refused: frozenset[str]
    ) -> Choice | None:
        """See `pool.Router`. The loads are the engines' own of now: nothing is stale, nothing on its way."""
        now, prompt = self._clock(), len(request.prompt_token_ids)
        limit = request.sampling.max_tokens
        needed = prompt + (self._reserve if limit is None else min(limit, self._reserve))
        prefill = {
            name: PrefillLoad(self._prefill_seconds(load.queued_prompt_tokens), now)
            for name, load in loads.items()
        }
        decode = {
            name: DecodeLoad(
                load.active_requests,
                load.kv_tokens_used,
                self._most_active,
                load.kv_tokens_used + load.kv_tokens_free,
                now,
            )
            for name, load in loads.items()
        }
        seconds = self._prefill_seconds(prompt)
        return choose_aggregated(
            prefill, decode, seconds, needed, self._decode, self._ledger, now, marked=refused
        )

    def _prefill_seconds(self, tokens: int) -> float:
        return (
            self._cost.seconds(self._cost.features(Work(context=0, prefill_tokens=tokens))) if tokens else 0.0
        )
