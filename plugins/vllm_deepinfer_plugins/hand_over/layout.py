"""A digest of all that two engines must have in common to use each other's KV."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig

from ..settings import Settings
from .settings import MODULE, STORE_MODULE

VERSION = 1
"""Of what our connector adds to vLLM's; raise it when two versions would misunderstand each other."""
_SAMPLES, _SAMPLE = 8, 4096


def hands_over(config: VllmConfig) -> bool:
    """Whether the engine hands KV over: by our NIXL connector, or by the prefix store if it is told to."""
    return bool(_way(config))


def kv_layout(config: VllmConfig) -> str:
    """The digest; "" for an engine that hands nothing over."""
    way = _way(config)
    if not way:
        return ""
    from vllm import __version__

    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    speculative = config.speculative_config
    facts = {
        "versions": [__version__, VERSION, *way],
        "model": _without_place(model.hf_config.to_dict()),
        "weights": list(_weights(Path(model.model))) or [model.model, model.revision],
        "dtype": str(model.dtype),
        "kv_dtype": str(cache.cache_dtype),
        "block_size": cache.block_size,
        # Whether Engram's ids and unfinished groups are paged, too, and which windows a block holds.
        "replayed": Settings.read(config.additional_config).encoder_replay is True,
        "groups": not config.scheduler_config.disable_hybrid_kv_cache_manager,
        "pipeline": parallel.pipeline_parallel_size,
        "speculation": []
        if speculative is None
        else [speculative.method, speculative.num_speculative_tokens],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _way(config: VllmConfig) -> list[object]:
    """How KV leaves the engine, with all that both ends must have in common for it; [] if it does not."""
    transfer = config.kv_transfer_config
    for module, extra in [] if transfer is None else _connectors(transfer):
        if module == MODULE:
            from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NIXL_CONNECTOR_VERSION

            return [NIXL_CONNECTOR_VERSION]
        if module == STORE_MODULE and extra.get("hand_over") is True:
            return ["store", extra.get("store"), extra.get("run_tokens"), extra.get("weights_id")]
    return []


def _connectors(transfer: KVTransferConfig) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    """Module and settings of the connector, or of each that a MultiConnector is made of."""
    extra = transfer.kv_connector_extra_config
    yield transfer.kv_connector_module_path, extra
    for child in extra.get("connectors", ()):
        yield child.get("kv_connector_module_path"), child.get("kv_connector_extra_config", {})


def _without_place(config: dict[str, object]) -> dict[str, object]:
    """A model's config without where it was read from."""
    return {
        key: value for key, value in config.items() if key not in ("_name_or_path", "transformers_version")
    }


def _weights(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Name, size and a digest of samples of each weight file: a fine-tune has the shapes of its base."""
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        size, digest = path.stat().st_size, hashlib.sha256()
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(max(size - _SAMPLE, 0) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE))
        yield path.name, size, digest.hexdigest()
