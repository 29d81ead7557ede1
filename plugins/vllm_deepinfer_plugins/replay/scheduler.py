"""The schedulers that an engine gets which replays and cuts no chunks to a time budget."""

from __future__ import annotations

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from .bounded import BoundedReplay
from .measured import Measured


class ReplayScheduler(Measured, BoundedReplay, Scheduler):
    """For synchronous scheduling."""


class AsyncReplayScheduler(Measured, BoundedReplay, AsyncScheduler):
    """For asynchronous scheduling."""
