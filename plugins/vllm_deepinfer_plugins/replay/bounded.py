"""What vLLM's schedulers get: a choice per prefix hit, window KV in host memory, orders to the worker.

The rewind of a hit is vLLM's own (`SlidingWindowMLASpec.bounded_replay`). Overridden are the look-up of a
local hit, which may be declined; the method that marks a replay, which may turn into a restored window; and
the places where a request begins and ends.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request

from vllm_deepinfer.policy.replay import TOKENS, Choice, Hit, Way, choose
from vllm_deepinfer.policy.step_cost import StepCost

from ..settings import Settings
from .keeper import WindowKeeper
from .ledger import Ledger
from .message import ReplayStep
from .settle import WORKERS
from .sizes import Sizes

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as Behind
else:
    Behind = object

COPIED_PER_SECOND = 4e9
"""Bytes of window KV that a host copies, rows gathered; 7 GB/s were seen alone on one core."""


class BoundedReplay(Behind):
    """Mixin in front of vLLM's Scheduler or AsyncScheduler. Without replayed groups it does nothing."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        settings = Settings.read(vllm_config.additional_config)
        # With any other worker, as vLLM's own class has, hits are replayed or declined and nothing else.
        ours = vllm_config.parallel_config.worker_cls in WORKERS
        trims, keeps = ours and settings.decoder_replay is True, ours and settings.encoder_replay is True
        rows = Sizes.of(vllm_config.model_config.hf_text_config).rows if trims else None
        self._ledger = Ledger(self.prefix_replay_tokens, rows)
        capacity = settings.window_tier_mib << 20 if keeps else 0
        self._windows = WindowKeeper(
            self.kv_cache_manager, kv_cache_config, self._ledger, capacity, settings.window_tier_ttl_s
        )
        self._now = time.monotonic

    def replay_cost(self) -> StepCost | None:
        """What a step costs, in seconds; None while nobody knows: tokens are counted then."""
        return None

    def schedule(self, throttle_prefills: bool = False) -> Any:
        if not self._ledger.active:
            return super().schedule(throttle_prefills)
        self._windows.keep_reached(self.requests, self._now())
        output = super().schedule(throttle_prefills)
        step = ReplayStep()
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        for key in (*(new.req_id for new in output.scheduled_new_reqs), *resumed):
            request = self.requests[key]
            step.starts[key] = self._ledger.begin(request)
            copy = self._windows.load(request, self._now())
            step.loads += [copy] if copy is not None else []
        for key, count in output.num_scheduled_tokens.items():
            self._ledger.advance(self.requests[key], count)
        step.saves, step.drops = self._windows.take()
        step.put_into(output)
        return output

    def _get_local_prefix_cache_hit(self, request: Request) -> Any:
        found = super()._get_local_prefix_cache_hit(request)
        tokens, key = found[1], request.request_id
        self._ledger.declined.discard(key)
        if not tokens or not self.prefix_replay_tokens:
            return found
        self._ledger.declined.add(key)  # unless `_mark_prefix_replay` is told of a hit
        if self.connector is not None:
            return found  # a connector may have more than this
        # vLLM itself declines what is no longer than the window.
        if tokens > self.prefix_replay_tokens and self._choose(request, tokens).way is not Way.RECOMPUTE:
            return found
        return self.kv_cache_manager.empty_kv_cache_blocks, 0, found[2], False

    def _mark_prefix_replay(self, request: Request, num_hit_tokens: int, window_loaded: bool) -> int:
        self._windows.forget(request.request_id)
        tokens = int(super()._mark_prefix_replay(request, num_hit_tokens, window_loaded))
        if not self.prefix_replay_tokens:
            return tokens
        if not num_hit_tokens:
            self._ledger.cold(request.request_id)
            return tokens
        self._ledger.declined.discard(request.request_id)
        if window_loaded:
            self._ledger.loaded(request.request_id, num_hit_tokens)
            return tokens
        choice = self._choose(request, num_hit_tokens)
        saved = choice.saved if self.replay_cost() is not None else 0.0
        if choice.way is Way.RESTORE:
            kept = self._windows.pin(request, num_hit_tokens, self._now())
            self._ledger.restored(request.request_id, num_hit_tokens, kept.floor, saved)
            request.replay_start = 0
            return 0
        self._ledger.replayed(request.request_id, num_hit_tokens, saved)
        return tokens

    def _choose(self, request: Request, tokens: int) -> Choice:
        cost = self.replay_cost()
        restore = None
        if self._windows.find(request, tokens, self._now()) is not None:
            restore = self._windows.bytes_per_slot / COPIED_PER_SECOND if cost is not None else 0.0
        return choose(
            Hit(tokens, request.num_tokens, restore),
            window=self.prefix_replay_tokens,
            cost=cost or TOKENS,
            chunk=max(self.max_num_scheduled_tokens, 1),
        )

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._windows.keep_last(request, self._now())
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._windows.keep_last(request, self._now())
        self._windows.forget(request.request_id)
        self._ledger.end(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self._windows.clear()
        return bool(super().reset_prefix_cache(*args, **kwargs))

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self._ledger.active:
            self._ledger.counts.put_into(stats)
        return stats
