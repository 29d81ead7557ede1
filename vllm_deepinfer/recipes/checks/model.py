"""The model itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from vllm_deepinfer.recipes.checks.context import Context, on_cpu


def check_model(context: Context) -> Iterator[str]:
    """It exists, its tokenizer too, and the engines can compute in its number format."""
    model = context.recipe.model
    if context.facts.fault:
        yield context.facts.fault
    folder = model.tokenizer or context.facts.folder
    if folder is not None:
        yield from _check_tokenizer("model.tokenizer" if model.tokenizer else "model.path", folder)
    for key, own in (("tiny", model.tiny), ("trained", model.trained)):
        if own is not None and model.tokenizer is not None:
            yield f"model.tokenizer is given, but a {key} model has a tokenizer of its own: leave it out."
    for name, pool in context.recipe.pools.items():
        if on_cpu(pool) and model.dtype == "float16":
            yield (
                f"model.dtype is float16, but pools.{name} runs on CPUs, whose class computes in bfloat16 or "
                "float32: write one of these."
            )
    for name, count in Counter(context.recipe.served_names).items():
        if count > 1:
            yield f"model.aliases has the name {name} that the model has already: drop it."


def _check_tokenizer(key: str, folder: Path) -> Iterator[str]:
    file = folder / "tokenizer.json"
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        yield f"{key} is {folder}, which has no tokenizer.json: copy the model's tokenizer.json there."
    except (OSError, ValueError, RecursionError):
        yield f"{key} is {folder}, whose tokenizer.json cannot be read: download it again."
    else:
        if not isinstance(parsed, dict) or "model" not in parsed:
            yield f"{key} is {folder}, whose tokenizer.json is no tokenizer: download it again."
