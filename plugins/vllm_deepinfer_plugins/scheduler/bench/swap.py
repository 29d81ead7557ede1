"""Another scheduler in a running in-process engine: twenty settings are measured on one set of weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def swap(
    core: Any,
    scheduler_class: type,
    *,
    deepinfer: Mapping[str, Any] | None = None,
    chunk: int | None = None,
    threshold: int | None = None,
    **scheduler_config: Any,
) -> Any:
    """Replace an idle engine core's scheduler, its KV cache manager included. Returns the new one.

    Args:
        core: vLLM's EngineCore, in this process, without requests.
        scheduler_class: of vLLM's constructor.
        deepinfer: our part of additional_config.
        chunk: max_num_batched_tokens, at most what the engine was started with.
        threshold: long_prefill_token_threshold; None: off.
        scheduler_config: other fields of vLLM's SchedulerConfig.
    """
    old = core.scheduler
    assert not old.has_unfinished_requests(), "the engine is not idle"
    config = copy.copy(core.vllm_config)
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.additional_config = {"deepinfer": dict(deepinfer or {})}
    if chunk is not None:
        scheduler_config |= {"max_num_batched_tokens": chunk, "max_num_scheduled_tokens": chunk}
    for name, value in {**scheduler_config, "long_prefill_token_threshold": threshold or 0}.items():
        object.__setattr__(config.scheduler_config, name, value)
    new = scheduler_class(
        vllm_config=config,
        kv_cache_config=old.kv_cache_config,
        structured_output_manager=core.structured_output_manager,
        include_finished_set=old.finished_req_ids_dict is not None,
        log_stats=old.log_stats,
        block_size=old.block_size,
        hash_block_size=old.hash_block_size,
    )
    new.finished_req_ids |= old.finished_req_ids  # the worker has not been told of them yet
    core.scheduler = new
    return new
