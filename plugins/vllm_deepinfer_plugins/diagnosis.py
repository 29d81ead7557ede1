"""What is wrong with a checkpoint folder, when somebody else's code has already failed on it.

Hugging Face and vLLM read config.json before our class is asked, and a damaged one ends there in a stack
trace about something else. Then the folder is read again, by the code that knows what must be in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_deepinfer.checkpoint.config import V41Config
from vllm_deepinfer.checkpoint.layout import verify_headers
from vllm_deepinfer.errors import UserError

MODEL_TYPE = "deepseek_v41"


def diagnosis(model: str | None) -> str | None:
    """One sentence about a local V4.1 checkpoint that makes no model; None if nothing is wrong or it is none.

    A config.json that is no JSON object is nobody's, so it is named whatever the model was to be.
    """
    folder = Path(model) if model else None
    if folder is None or not (folder / "config.json").is_file():
        return None
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        return None
    except ValueError:
        fields = None
    if isinstance(fields, dict) and not _is_v41(fields):
        return None
    try:
        verify_headers(folder, V41Config.load(folder))
    except UserError as error:
        return str(error)
    return None


def model_of(arguments: Sequence[str]) -> str | None:
    """The model that a command line of `vllm serve` or `vllm bench` names."""
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in ("--model", "--model-tag"):
            return value if equals else next(iter(arguments[at + 1 :]), None)
    if len(arguments) > 2 and arguments[1] == "serve" and not arguments[2].startswith("-"):
        return arguments[2]
    return None


def _is_v41(fields: dict[str, Any]) -> bool:
    return fields.get("model_type") == MODEL_TYPE or "DeepseekV41" in str(fields.get("architectures"))
