"""`check` and `serve` read a recipe in the same way: everything wrong with it in one list."""

from __future__ import annotations

import copy
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from vllm_deepinfer.recipes.check import check_recipe
from vllm_deepinfer.recipes.cluster_view import ClusterView
from vllm_deepinfer.recipes.errors import RecipeError
from vllm_deepinfer.recipes.load import anchored, build, read
from vllm_deepinfer.recipes.schema import Ray, Recipe
from vllm_deepinfer.recipes.sentences import keys_at
from vllm_deepinfer.recipes.yaml_lines import Document

Look = Callable[[Ray], ClusterView | None]
"""The cluster that a recipe with these settings runs on; None: unknown."""


def inspect_recipe(
    path: Path | str,
    look: Look = lambda ray: None,
    change: Callable[[Recipe], Recipe] = lambda recipe: recipe,
) -> tuple[Recipe, ClusterView | None]:
    """A recipe without any known fault, and the cluster that it was checked against.

    Unknown keys do not hide what else is wrong: the checks run on what they were probably meant to be.

    Args:
        look: called once, when the recipe's own cluster settings are known.
        change: what the command line makes of the recipe, before it is checked.
    Raises:
        RecipeError: every fault as one sentence that starts with the file's name.
        UserError: `look` found no cluster.
    """
    file = Path(path)
    document = read(file)
    recipe, faults = build(document)
    if recipe is None:
        recipe, _ = build(corrected(document))
    cluster = None
    if recipe is not None:
        recipe = change(anchored(recipe, file.resolve().parent))
        cluster = look(recipe.ray)
        faults = faults + [located(fault, document) for fault in check_recipe(recipe, cluster)]
    if faults or recipe is None:
        raise RecipeError(f"{file}: {fault}" for fault in faults)
    return recipe, cluster


def located(fault: str, document: Document) -> str:
    """A sentence that starts with a key, with the line of that key or of the part that it belongs to."""
    key = fault.split(" ", 1)[0].rstrip(":").split("[", 1)[0]
    line = document.line(tuple(key.split(".")))
    return fault if line is None else f"line {line}: {fault}"


def corrected(document: Document) -> Document:
    """The document with unknown keys renamed to the nearest known one that is not there, or dropped."""
    value = copy.deepcopy(document.value)
    _correct(value, ())
    return Document(value, document.lines)


def _correct(value: Any, path: tuple[str | int, ...]) -> None:
    if not isinstance(value, dict):
        return
    known = keys_at(path)
    for key in list(value):
        if known and key not in known:
            kept = value.pop(key)
            near = [name for name in get_close_matches(key, known, n=1) if name not in value]
            if not near:
                continue
            key = near[0]
            value[key] = kept
        _correct(value[key], (*path, key))
