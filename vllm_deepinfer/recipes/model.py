"""The part of a recipe that names the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from vllm_deepinfer.checkpoint.options import TinyOptions
from vllm_deepinfer.recipes.base import Part

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Text = Annotated[str, Field(min_length=1)]


class Trained(Part):
    """The trained checkpoint has no options: write `trained: {}`."""


class Model(Part):
    """Which weights all pools serve. Exactly one of `path`, `trained` and `tiny` is given.

    Attributes:
        path: a checkpoint folder, or a Hugging Face id such as deepseek-ai/DeepSeek-V4.1-Flash. A relative
            folder is relative to the recipe's file.
        trained: the small checkpoint that comes with the library and has learnt something.
        tiny: write a small checkpoint with random weights at the first start; options of
            `vllm-deepinfer tiny-checkpoint`.
        served_name: what clients call the model; None: the folder's name, or the recipe's where
            `path` is not given.
        aliases: further names that clients may use.
        tokenizer: a folder with tokenizer.json; None: the checkpoint's.
        dtype: number format of the engines' computation, vLLM's `dtype`.
    """

    path: Text | None = None
    trained: Trained | None = None
    tiny: TinyOptions | None = None
    served_name: Text | None = None
    aliases: tuple[Text, ...] = ()
    tokenizer: Path | None = None
    dtype: Dtype = "auto"
