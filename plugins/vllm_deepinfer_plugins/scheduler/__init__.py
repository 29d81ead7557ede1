"""vLLM schedulers that cut prefill chunks to a time budget instead of a number of tokens.

    vllm serve MODEL --scheduler-cls vllm_deepinfer_plugins.scheduler.TimeBudgetScheduler \
        --additional-config '{"deepinfer": {"itl_target_ms": 40}}'

One of the two fits a deployment: the first where vLLM schedules synchronously (CPUs, --no-async-scheduling),
the second where it schedules ahead (its default on GPUs). The wrong one refuses to start and names the other.
"""

from __future__ import annotations

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from ..replay.bounded import BoundedReplay
from ..verification.adaptive import AdaptiveVerification
from .time_budget import TimeBudget

__all__ = ["AsyncTimeBudgetScheduler", "TimeBudgetScheduler"]


class TimeBudgetScheduler(AdaptiveVerification, TimeBudget, BoundedReplay, Scheduler):
    """For synchronous scheduling. With speculation, drafts and prefill share a step's budget."""


class AsyncTimeBudgetScheduler(TimeBudget, BoundedReplay, AsyncScheduler):
    """For asynchronous scheduling."""

    schedules_ahead = True
