"""The settings with which two engines hand KV over, as `AsyncEngineArgs.kv_transfer_config` takes them."""

from __future__ import annotations

from typing import Any, Literal

MODULE = "vllm_deepinfer_plugins.hand_over.connector"
STORE_MODULE = "vllm_deepinfer_plugins.kv_connector"
STORE_KEY = "prefix_store"
"""In `kv_transfer_params`: what the prefix store has, or is to do. No other part of them is the store's."""
Role = Literal["prefill", "decode", "both"]
_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}


def transfer_config(
    role: Role, *, lease_s: int = 60, fetch_timeout_s: float = 20.0, cpu: bool = False
) -> dict[str, Any]:
    """What `--kv-transfer-config` takes.

    Args:
        role: what the engine does; "both" for either.
        lease_s: how long KV is held for a decode engine that never asks.
        fetch_timeout_s: after that a fetch is stopped and the prompt computed.
        cpu: the KV lies in main memory; NIXL then starts no threads, and an idle engine looks for news every
            few milliseconds only: both would spin against the engines' own threads.
    """
    extra: dict[str, Any] = {"kv_lease_duration": lease_s, "fetch_timeout_s": fetch_timeout_s}
    config: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": MODULE,
        "kv_role": _ROLES[role],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    if cpu:
        config["kv_buffer_device"] = "cpu"
        extra |= {"num_threads": 0, "idle_poll_s": 0.004}
    return config
