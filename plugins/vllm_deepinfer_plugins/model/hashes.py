"""Engram's hash from the tokenizer that an engine runs with."""

from __future__ import annotations

from tokenizers import Tokenizer
from vllm.config import ModelConfig
from vllm.transformers_utils.repo_utils import get_hf_file_bytes

from vllm_deepinfer.checkpoint.config import V41Config
from vllm_deepinfer.checkpoint.engram import EngramHash
from vllm_deepinfer.checkpoint.errors import CheckpointError

FILE = "tokenizer.json"


def engram_hash(model: ModelConfig) -> EngramHash | None:
    """The Engram hash of the engine's tokenizer, or None for a config without Engram layers.

    Raises:
        CheckpointError: There is no tokenizer.json, or it cannot be read.
        ConfigError: The tokenizer's compressed vocabulary is not the config's.
    """
    config = V41Config.from_dict(model.hf_config.to_dict()).text_config
    if not any(plan.engram is not None for plan in config.schedule()):
        return None
    source = model.tokenizer or model.model
    data = get_hf_file_bytes(FILE, source, model.tokenizer_revision)
    if data is None:
        raise CheckpointError(f"{source} has no {FILE}, which Engram's token map is made from: add it")
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # tokenizers raises nothing more particular
        cause = " ".join(str(error).split())
        raise CheckpointError(f"{source}/{FILE} is no tokenizer ({cause}): download it again") from None
    return EngramHash.build(config, tokenizer)
