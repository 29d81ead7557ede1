"""The config.json of a DeepSeek-V4.1 checkpoint: read, checked, and asked for its layer schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, StrictInt, ValidationError

from .errors import ConfigError
from .schedule import LayerPlan
from .text_config import TextConfig, one_sentence

__all__ = ["ConfigError", "LayerPlan", "TextConfig", "V41Config", "VisionConfig"]

MODEL_TYPE = "deepseek_v41"


class VisionConfig(BaseModel):
    """The vision tower's size; 0 layers is a text-only checkpoint. Other keys are kept as they are."""

    model_config = ConfigDict(frozen=True, extra="allow")

    num_hidden_layers: StrictInt = 0


class V41Config(BaseModel):
    """A whole config.json: ids and data type at the top, ``text_config`` and ``vision_config`` below.

    Raises:
        ConfigError: A field is missing, of the wrong type or describes no model that can run.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    architectures: tuple[str, ...] = ("DeepseekV41ForCausalLM",)
    model_type: str = MODEL_TYPE
    dtype: str = "bfloat16"
    bos_token_id: StrictInt = 0
    eos_token_id: StrictInt = 1
    pad_token_id: StrictInt | None = 2
    image_token_id: StrictInt | None = None
    text_config: TextConfig
    vision_config: VisionConfig = VisionConfig()
    quantization_config: dict[str, Any] | None = None

    @classmethod
    def load(cls, path: Path | str) -> V41Config:
        """Read a checkpoint folder's config.json, or the file itself.

        Raises:
            ConfigError: There is no such file, it is no JSON object, or its fields describe no model that can
                run.
        """
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{file} cannot be read ({error.strerror}): name a checkpoint folder") from None
        except ValueError as error:
            raise ConfigError(f"{file} is no JSON ({error}): write the released config.json there") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"{file} holds no JSON object: write the released config.json there")
        return cls.from_dict(fields)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> V41Config:
        """Build from the released nested form, or from one flat object that has the text fields at the top.

        vLLM's own config class for ``deepseek_v41`` is such a flat object.

        Raises:
            ConfigError: A field is missing, of the wrong type or describes no model that can run.
        """
        top = dict(fields)
        model_type = top.get("model_type", MODEL_TYPE)
        if model_type != MODEL_TYPE:
            raise ConfigError(
                f'model_type is "{model_type}": name a DeepSeek-V4.1 checkpoint, whose type is "{MODEL_TYPE}"'
            )
        text = top.get("text_config") or top
        if not isinstance(text, dict):
            raise ConfigError("text_config is no JSON object: write the fields of the language model there")
        dtype = top.get("dtype") or top.get("torch_dtype") or text.get("dtype") or "bfloat16"
        top["dtype"] = str(dtype).removeprefix("torch.")
        # The released config says it at the top as well, and either place would make another model.
        tied = {"tie_word_embeddings": True} if top.get("tie_word_embeddings") else {}
        top["text_config"] = TextConfig(**{**text, **tied})
        if top.get("vision_config") is None:
            top["vision_config"] = {"num_hidden_layers": top.get("vision_n_layers", 0)}
        try:
            return cls.model_validate(top)
        except ValidationError as error:
            raise one_sentence(error, "") from None
