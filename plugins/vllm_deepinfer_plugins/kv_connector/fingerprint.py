"""The fingerprint of an engine: everything that decides what KV a token gets, and how its bytes lie."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import vllm.envs as envs
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.version import __version__ as vllm_version

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.store.keys import fingerprint

from .groups import StoredGroup

_SAMPLE = 4_096
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tekken.json",
)
_VOLATILE = ("_name_or_path", "transformers_version", "_commit_hash", "torch_dtype", "dtype")


def engine_fingerprint(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    groups: tuple[StoredGroup, ...],
    run_tokens: int,
    weights_id: str | None,
) -> bytes:
    """Equal in every engine whose KV may be shared, 32 bytes.

    Raises:
        UserError: the weights cannot be told apart from others.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    deepinfer = (vllm_config.additional_config or {}).get("deepinfer", {})
    return fingerprint(
        {
            "weights": weights_id or weights_identity(vllm_config),
            "config": _config(model.hf_config),
            "tokenizer": tokenizer_identity(str(model.tokenizer)),
            "dtype": str(model.dtype),
            "quantization": str(model.quantization),
            "kv_dtype": str(cache.cache_dtype),
            "layout": str(kv_cache_config.kv_cache_layout),
            "groups": [[g.index, g.block_size, g.window, list(g.layers), list(g.page_bytes)] for g in groups],
            "run_tokens": run_tokens,
            "shards": shards(vllm_config, kv_cache_config),
            "batch_invariant": bool(deepinfer.get("batch_invariant") or envs.VLLM_BATCH_INVARIANT),
            "vllm": vllm_version,
        }
    )


def shards(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Parts of the KV over the ranks of an engine; ranks that hold the same count once.

    Raises:
        UserError: a way of splitting that the store does not know.
    """
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            raise UserError(f"The prefix store works with tensor and data parallelism only; set {name} to 1.")
    return int(parallel.tensor_parallel_size // kv_cache_config.kv_tp_replicas)


def _config(config: Any) -> str:
    """The model's config as text, without what says nothing about the KV."""
    values = {k: v for k, v in config.to_dict().items() if k not in _VOLATILE}
    return json.dumps(values, sort_keys=True, default=str)


def weights_identity(vllm_config: VllmConfig) -> str:
    """Digest of a checkpoint's files, or the commit of one on a hub.

    Raises:
        UserError: neither is known.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format == "dummy":
        return f"dummy seed {model.seed}"
    folder = Path(model.model)
    if folder.is_dir():
        return checkpoint_digest(folder)
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision
    if commit:
        return f"{model.model}@{commit}"
    raise UserError(
        f"The prefix store cannot tell which weights {model.model!r} has; "
        'write "weights_id" into kv_connector_extra_config, a name that changes when they do.'
    )


def checkpoint_digest(folder: Path) -> str:
    """SHA-256 over names, sizes, and the first and last 4 KiB of every tensor.

    A fine-tune changes nearly every element of the tensors that it touches, and reading 4 KiB of each is
    quick where reading half a terabyte at every start is not.
    """
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in _WEIGHTS):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with open(path, "rb") as file:
            for start, end in _pieces(file, path, size):
                for offset in (start, max(start, end - _SAMPLE)):
                    digest.update(os.pread(file.fileno(), min(_SAMPLE, end - offset), offset))
    return digest.hexdigest()


def _pieces(file: Any, path: Path, size: int) -> list[tuple[int, int]]:
    """Byte ranges of the tensors of a file; ranges of 64 MiB where its format does not say."""
    if path.suffix == ".safetensors" and size >= 8:
        (length,) = struct.unpack("<Q", file.read(8))
        if length <= min(size - 8, 1 << 28):
            header = json.loads(file.read(length))
            spans = [v["data_offsets"] for k, v in header.items() if k != "__metadata__"]
            return [(0, 8 + length), *((8 + length + a, 8 + length + b) for a, b in sorted(spans) if a < b)]
    step = 64 << 20
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def tokenizer_identity(tokenizer: str) -> str:
    """Digest of a tokenizer folder's files, or its name."""
    folder = Path(tokenizer)
    if not folder.is_dir():
        return tokenizer
    digest = hashlib.sha256()
    for name in _TOKENIZER:
        path = folder / name
        if path.is_file():
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
