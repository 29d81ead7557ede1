"""What a small checkpoint is to be, and the config.json that follows from it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer

from .config import MODEL_TYPE, TextConfig, V41Config
from .encoding import BLOCK
from .errors import ConfigError
from .layout import Encoding
from .text_fields import text_fields
from .tokenizer import IMAGE, SYSTEM, released_tokenizer, small_tokenizer

SMALL_VOCAB, RELEASED_VOCAB = 1024, 129280
_RELEASED_IMAGE, _RELEASED_SYSTEM = 129264, 128799
_DTYPE: dict[Encoding, str] = {"released": "bfloat16", "bf16": "bfloat16", "fp32": "float32"}

# The sizes of the vision tower as released; 0 layers make the checkpoint text-only.
_VISION = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 0,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "patch_size": 14,
    "rope_theta": 10000,
    "downsample_ratio": 3,
    "max_image_tokens": 1024,
    "min_pixels": 295936,
    "max_wh_ratio": None,
}
QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


class TinyOptions(BaseModel):
    """The shape of a small checkpoint. What is None follows from the rest as in the release.

    ``overrides`` sets any text_config field by its released name, last.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: int | None = None
    ratios: tuple[int, ...] | None = None
    kv_sources: tuple[int, ...] | None = None
    index_sources: tuple[int, ...] | None = None
    candidate_source: int | None = None
    engram_layers: tuple[int, ...] | None = None
    hidden: int = 64
    heads: int = 4
    head_dim: int = 32
    experts: int = 8
    top_k: int = 2
    expert_width: int | None = None
    window: int = 16
    vocab: int | None = None
    tokenizer: Literal["small", "released"] = "small"
    context_length: int = 8192
    dspark_blocks: int = 0
    encoding: Encoding = "fp32"
    seed: int = 0
    overrides: dict[str, Any] = Field(default_factory=dict)

    def build_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer.

        Raises:
            ConfigError: The vocabulary is too small, or is not the released tokenizer's.
        """
        if self.tokenizer == "small":
            return small_tokenizer(SMALL_VOCAB if self.vocab is None else self.vocab)
        if self.vocab not in (None, RELEASED_VOCAB):
            raise ConfigError(
                f"text_config.vocab_size is {self.vocab}: write {RELEASED_VOCAB}, or leave it out, because "
                "that is the released tokenizer's size"
            )
        return released_tokenizer()

    def build_config(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """The whole config.json, in the released order of keys.

        Raises:
            ConfigError: The options describe no model that can run or be encoded.
        """
        released = self.tokenizer == "released"
        text = text_fields(self, tokenizer, noise=_RELEASED_SYSTEM if released else SYSTEM)
        config: dict[str, Any] = {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": MODEL_TYPE,
            "dtype": _DTYPE[self.encoding],
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "image_token_id": _RELEASED_IMAGE if released else IMAGE,
            "tie_word_embeddings": False,
            "quantization_config": QUANTIZATION,
            "text_config": text,
            "vision_config": _VISION,
        }
        if self.encoding != "released":
            del config["quantization_config"]
        check_encodable(V41Config.from_dict(config).text_config, self.encoding)
        return config


def check_encodable(text: TextConfig, encoding: Encoding) -> None:
    """Rows with a scale per 32 columns need whole blocks."""
    if encoding != "released":
        return
    names = ["hidden_size", "moe_intermediate_size", *(["engram_head_dim"] if text.engram_layer_ids else [])]
    for name in names:
        if getattr(text, name) % BLOCK:
            raise ConfigError(
                f"text_config.{name} is {getattr(text, name)}: write a multiple of {BLOCK}, because the "
                "released encoding has a scale per 32 columns"
            )
