"""Decides, before an engine starts, which replays it runs with, and chooses worker and scheduler for them.

The decision is written into additional_config, so that scheduler, worker and model read the same one.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.platforms import current_platform

from vllm_deepinfer.errors import UserError

from ..kernels.prepare import fallbacks
from ..settings import Settings

logger = logging.getLogger(__name__)

PLATFORM_WORKERS = ("auto", "vllm.v1.worker.cpu_worker.CPUWorker")
WORKER = "vllm_deepinfer_plugins.replay.worker.ReplayWorker"
WORKERS = (WORKER, "vllm_deepinfer_plugins.draft.worker.DraftWorker")
"""Those that hand replays to the model; `draft.settle` has chosen the second before."""
SCHEDULER = "vllm_deepinfer_plugins.replay.scheduler.ReplayScheduler"

BY_DEFAULT = True
"""As vLLM has it for its own class; batch-invariant mode promises what a replay cannot keep."""


class ReplayError(UserError):
    """A replay was asked for that this engine cannot run."""


def settle(vllm_config: Any) -> None:
    """Settle both replays for this project's V4.1 class.

    Raises:
        ReplayError: One sentence about a setting that cannot be followed.
    """
    settings = Settings.read(vllm_config.additional_config)
    cache = vllm_config.cache_config
    wanted = BY_DEFAULT and cache.swa_bounded_replay and not settings.invariant
    encoder = _settle("encoder_replay", settings.encoder_replay, wanted, _obstacle(vllm_config))
    # Windows that a prompt's first rows never had must not come out of a prefix cache or store.
    caches = cache.enable_prefix_caching or vllm_config.kv_transfer_config is not None
    cached = caches and not encoder
    stale = "prefix caches would hold windows that nobody computed: write encoder_replay true as well"
    decoder = _settle(
        "decoder_replay",
        settings.decoder_replay,
        (wanted or (encoder and not settings.invariant)) and not cached,
        _worker_obstacle(vllm_config) or (stale if cached else None),
    )
    if (encoder or decoder) and vllm_config.parallel_config.worker_cls not in WORKERS:
        vllm_config.parallel_config.worker_cls = WORKER
    if (encoder or decoder) and vllm_config.scheduler_config.scheduler_cls is None:
        vllm_config.scheduler_config.scheduler_cls = SCHEDULER
    if encoder and settings.encoder_replay is None:
        logger.info(
            "SWA bounded replay is on: an answer behind a prefix hit is not bit for bit that of a cold run. "
            "--no-swa-bounded-replay or batch_invariant turn it off."
        )
    part = dict((vllm_config.additional_config or {}).get("deepinfer", {}))
    part |= {"encoder_replay": encoder, "decoder_replay": decoder}
    vllm_config.additional_config = {**(vllm_config.additional_config or {}), "deepinfer": part}


def refuse_for_native(settings: Settings) -> None:
    """Where vLLM's own class runs, vLLM's flags rule.

    Raises:
        ReplayError: One sentence about a setting that nobody would read.
    """
    for name in ("encoder_replay", "decoder_replay"):
        if getattr(settings, name) is not None:
            raise ReplayError(
                f'additional_config["deepinfer"]["{name}"] is for this project\'s DeepSeek-V4.1 class: leave '
                "it out, vLLM's own follows --swa-bounded-replay"
            )


def _settle(name: str, asked: bool | None, default: bool, obstacle: str | None) -> bool:
    wanted = default if asked is None else asked
    if not wanted or obstacle is None:
        return wanted
    if asked:
        raise ReplayError(f'additional_config["deepinfer"]["{name}"] is true, but {obstacle}')
    fallbacks().labels(part=name).inc()
    logger.warning("%s is off: %s", name, obstacle)
    return False


def _obstacle(vllm_config: Any) -> str | None:
    """Why windows cannot be replayed; None if they can."""
    return _worker_obstacle(vllm_config) or _scheduler_obstacle(vllm_config.scheduler_config)


def _worker_obstacle(vllm_config: Any) -> str | None:
    worker = vllm_config.parallel_config.worker_cls
    if not current_platform.is_cpu() or vllm_config.use_v2_model_runner:
        return "this project's model class replays on CPUs with vLLM's model runner V1 only: leave it out"
    if worker not in (*PLATFORM_WORKERS, *WORKERS):
        return f"--worker-cls is {worker}, which hands no replays to the model: leave the flag out"
    return None


def _scheduler_obstacle(scheduler_config: Any) -> str | None:
    from .bounded import BoundedReplay

    chosen = scheduler_config.scheduler_cls
    if chosen is None:
        return None
    cls = scheduler_config.get_scheduler_cls()
    if isinstance(cls, type) and issubclass(cls, BoundedReplay):
        return None
    return (
        f"--scheduler-cls is {chosen}, which sends the worker no replays: leave the flag out, or write one "
        "of vllm_deepinfer_plugins.scheduler"
    )
