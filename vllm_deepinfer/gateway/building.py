"""From a checkpoint folder and settings to a GatewayApp."""

from __future__ import annotations

import json
from pathlib import Path

from deepseek_recipe import ModelVersion, Tokenizer

from vllm_deepinfer.engine import Engine
from vllm_deepinfer.errors import UserError
from vllm_deepinfer.gateway.app import GatewayApp
from vllm_deepinfer.gateway.core import Core
from vllm_deepinfer.gateway.dialects.base import ModelCard
from vllm_deepinfer.gateway.limits.keys import KeyRing
from vllm_deepinfer.gateway.settings import GatewaySettings
from vllm_deepinfer.gateway.tokens import PromptTokenizer, TokenizerError

VERSIONS = {
    "deepseek_v4": ModelVersion.DeepseekV4Pro,
    "deepseek_v41": ModelVersion.DeepseekV41Flash,
    "deepseek_v4_1": ModelVersion.DeepseekV41Flash,
}
CONTROL_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "</think>",
    "｜DSML｜",
)


def model_version(folder: Path) -> ModelVersion:
    """The dialect of a checkpoint by the exact `model_type` of its config.json; V4.1 without one.

    Exact, because "deepseek_v4" is part of "deepseek_v41", and the wrong parser shows tool calls as text.
    Raises: UserError for a model of another family.
    """
    file = folder / "config.json"
    if not file.exists():
        return ModelVersion.DeepseekV41Flash
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        kind = config["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{file} is not a readable config.json with a model_type.") from None
    if kind not in VERSIONS:
        raise UserError(f"{file}: model_type {kind!r} is not one of {', '.join(sorted(VERSIONS))}.")
    return VERSIONS[kind]


def build_app(
    engine: Engine,
    tokenizer_folder: Path,
    settings: GatewaySettings,
    keys: KeyRing | None = None,
    *,
    version: ModelVersion | None = None,
    max_model_len: int | None = None,
) -> GatewayApp:
    """A gateway on an engine that the app's lifespan will start.

    Args:
        tokenizer_folder: holds tokenizer.json, and config.json unless `version` is given.
        max_model_len: of the engine, if its info is only valid after its start.
    Raises: UserError.
    """
    try:
        prompts = PromptTokenizer.from_file(tokenizer_folder)
        prompts.require(CONTROL_TOKENS)
    except TokenizerError as error:
        raise UserError(str(error)) from None
    card = ModelCard(
        names=settings.served_names,
        version=model_version(tokenizer_folder) if version is None else version,
        max_model_len=max_model_len or engine.info.max_model_len,
        thinking=settings.thinking,
        classes=settings.classes,
    )
    output = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    return GatewayApp(Core(engine, card, settings, prompts, output, keys))
