"""Configs that the tests start from."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from vllm_deepinfer.checkpoint.config import ConfigError, TextConfig
from vllm_deepinfer.checkpoint.tokenizer import released_tokenizer

DATA = Path(__file__).parent / "data"
FIXTURES = ("tiny", "tiny-dspark", "tiny-no-candidates")


@cache
def released() -> Tokenizer:
    """The released vocabulary, which takes seconds to build."""
    return released_tokenizer()


def config(name: str = "tiny-dspark") -> dict[str, Any]:
    """A whole config.json: `released`, or one of the fixtures."""
    fields: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return fields


def text(name: str = "tiny-dspark", /, **changes: Any) -> dict[str, Any]:
    """The text_config of one of them with fields replaced; a field set to `...` is left out."""
    fields = copy.deepcopy(config(name)["text_config"]) | changes
    return {field: value for field, value in fields.items() if value is not ...}


def text_config(name: str = "tiny-dspark", /, **changes: Any) -> TextConfig:
    """The same, validated."""
    return TextConfig(**text(name, **changes))


def refusal(name: str = "tiny-dspark", /, **changes: Any) -> str:
    """The one sentence with which a changed text_config is refused."""
    with pytest.raises(ConfigError) as caught:
        text_config(name, **changes)
    return sentence(caught.value)


def sentence(error: BaseException) -> str:
    """The message of an error, checked to be one sentence on one line."""
    message = str(error)
    assert "\n" not in message
    assert ". " not in message.replace("e.g. ", "")
    assert ": " in message  # what is wrong, then what to write instead
    return message
