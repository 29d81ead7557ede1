"""The general plugin: vLLM calls `register` once in every process that it starts, and sometimes more than once."""

from __future__ import annotations


def register() -> None:
    """Prepare this process for our classes. Idempotent.

    On a CPU with AMX the process asks the kernel for tile permission: without it a process whose first forward
    pass is tiny (1 to 4 tokens, as in every decode-only worker) dies with SIGILL in `cpu_attention_with_kv_cache`.
    """
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
