"""From a YAML file to a Recipe."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pydantic import ValidationError

from vllm_deepinfer.recipes import yaml_lines
from vllm_deepinfer.recipes.errors import RecipeError
from vllm_deepinfer.recipes.schema import Pool, Recipe
from vllm_deepinfer.recipes.sentences import sentences
from vllm_deepinfer.recipes.yaml_lines import Document


def load_recipe(path: Path | str) -> Recipe:
    """Read a recipe. Relative paths in it become relative to its folder.

    Raises:
        RecipeError: The file cannot be read or is no recipe; one sentence per fault.
    """
    file = Path(path)
    document = read(file)
    recipe, faults = build(document)
    if recipe is None or faults:
        raise RecipeError(f"{file}: {fault}" for fault in faults)
    return anchored(recipe, file.resolve().parent)


def read(file: Path) -> Document:
    """The file's document. Raises: RecipeError with one sentence."""
    try:
        document = yaml_lines.parse(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError([f"{file}: there is no such file."]) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise RecipeError([f"{file}: the recipe cannot be read ({reason})."]) from None
    except ValueError as error:
        raise RecipeError([f"{file}: this is no YAML: {error}."]) from None
    if not isinstance(document.value, dict):
        raise RecipeError([f"{file}: write keys and values, such as name: my-cluster."])
    return document


def build(document: Document) -> tuple[Recipe | None, list[str]]:
    """The recipe, or None, and what is wrong with the document."""
    faults = [f"{fault}." for fault in document.faults]
    try:
        return Recipe.model_validate_json(json.dumps(document.value), strict=True), faults
    except ValidationError as error:
        return None, faults + sentences(error, document)


def anchored(recipe: Recipe, folder: Path) -> Recipe:
    """The same recipe with the paths of its files made absolute from the recipe's folder."""
    model = recipe.model
    changes: dict[str, object] = {}
    if model.tokenizer is not None:
        changes["tokenizer"] = folder / model.tokenizer
    if model.path is not None:
        changes["path"] = local(model.path, folder)
    pools = {
        name: pool
        if pool.model_path is None
        else pool.model_copy(update={"model_path": local(pool.model_path, folder)})
        for name, pool in recipe.pools.items()
    }
    gateway = recipe.gateway
    files = {
        name: folder / value
        for name in ("api_keys", "response_db")
        if (value := getattr(gateway, name)) is not None
    }
    return recipe.model_copy(
        update={
            "model": model.model_copy(update=changes),
            "pools": pools,
            "gateway": gateway.model_copy(update=files),
        }
    )


def _anchored_pool(pool: Pool, folder: Path) -> Pool:
    if pool.model_path is None:
        return pool
    return pool.model_copy(update={"model_path": local(pool.model_path, folder)})


def local(path: str, folder: Path) -> str:
    """A folder from the recipe's own place; a Hugging Face id stays as it is.

    `org/name` that is no folder there is taken for an id, everything else for a folder.
    """
    found = folder / Path(os.path.expanduser(path))
    looks_like_id = path.count("/") == 1 and not path.startswith((".", "/", "~"))
    return path if looks_like_id and not found.exists() else str(found)
