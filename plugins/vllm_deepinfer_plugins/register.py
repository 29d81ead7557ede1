"""The general plugin: vLLM calls `register` in every process that it starts, and sometimes more than once."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

MODEL = "vllm_deepinfer_plugins.model.causal_lm:DeepseekV41ForCausalLM"


def register() -> None:
    """Make our classes known in this process. Idempotent; imports nothing that only one platform has.

    On a CPU with AMX the process asks the kernel for tile permission: without it a process whose first
    forward pass is tiny (1 to 4 tokens, as in every decode-only worker) dies with SIGILL in
    `cpu_attention_with_kv_cache`.
    """
    import torch
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.platforms import current_platform

    from . import cli_errors, expansion, orphans, ranks, seeds
    from .model.config_hook import NATIVE_NAME, PORTABLE_NAME, V41ConfigHook, native_class_exists
    from .tokenizer import register_tokenizer

    orphans.watch_parent()
    cli_errors.install()
    register_tokenizer()
    if current_platform.is_cpu():
        seeds.install()
        expansion.install()
        ranks.install()
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()
    elif current_platform.is_cuda() or current_platform.is_rocm():
        _correct_verification()
    ModelRegistry.register_model(PORTABLE_NAME, MODEL)
    if not native_class_exists():
        ModelRegistry.register_model(NATIVE_NAME, MODEL)
    MODELS_CONFIG_MAP[PORTABLE_NAME] = V41ConfigHook
    MODELS_CONFIG_MAP[NATIVE_NAME] = V41ConfigHook


def _correct_verification() -> None:
    """Where vLLM's own adaptive verification is not the one that we know, it stays as it is."""
    try:
        from .verification import upstream
    except ImportError as error:
        logger.warning("vLLM's adaptive verification keeps its own costs: %s.", error)
    else:
        upstream.install()
