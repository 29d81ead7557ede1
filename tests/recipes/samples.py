"""Recipes and clusters that the tests start from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_deepinfer.recipes import Recipe, RecipeError
from vllm_deepinfer.recipes.check import check_recipe
from vllm_deepinfer.recipes.checks.context import Check, Context
from vllm_deepinfer.recipes.cluster_view import ClusterView, NodeView
from vllm_deepinfer.recipes.facts import model_facts
from vllm_deepinfer.recipes.load import build, load_recipe
from vllm_deepinfer.recipes.yaml_lines import Document

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))

SPLIT: dict[str, Any] = {
    "name": "test",
    "model": {"tiny": {}},
    "pools": {
        "prefill": {"role": "prefill", "engine_args": {"max_model_len": 4096}, "kv_gib": 0.25},
        "decode": {"role": "decode", "engine_args": {"max_model_len": 4096}, "kv_gib": 0.25},
    },
    "transfer": {"kind": "nixl", "nixl": {"buffer_device": "cpu"}},
}
ALONE: dict[str, Any] = {
    "name": "test",
    "model": {"tiny": {}},
    "pools": {"all": {"role": "aggregated"}},
}
SIMULATED: dict[str, Any] = {
    "name": "test",
    "model": {"tiny": {}},
    "pools": {
        "prefill": {"role": "prefill", "engine": "simulated", "simulated": {}},
        "decode": {"role": "decode", "engine": "simulated", "simulated": {}},
    },
    "transfer": {"kind": "nixl"},
}


def changed(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A deep copy with values set by dotted keys; `...` removes one."""
    value = copy.deepcopy(base)
    for key, new in changes.items():
        part, *path = value, *key.split(".")
        for step in path[:-1]:
            part = part.setdefault(step, {})
        if new is ...:
            del part[path[-1]]
        else:
            part[path[-1]] = new
    return value


def recipe(base: dict[str, Any] = SPLIT, /, **changes: Any) -> Recipe:
    """A recipe; dotted keys are written with double underscores."""
    dotted = {key.replace("__", "."): new for key, new in changes.items()}
    built, faults = build(Document(changed(base, dotted)))
    assert built is not None and not faults, faults
    return built


def faults(
    base: dict[str, Any] = SPLIT,
    /,
    *,
    cluster: ClusterView | None = None,
    check: Check | None = None,
    **changes: Any,
) -> list[str]:
    """What is wrong with a recipe, by all checks or by one."""
    found = recipe(base, **changes)
    if check is None:
        return check_recipe(found, cluster)
    return list(check(Context(found, model_facts(found.model), cluster)))


def load_faults(text: str, folder: Path) -> list[str]:
    """What loading this text says, without the file's name."""
    file = folder / "recipe.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as raised:
        load_recipe(file)
    return [fault.removeprefix(f"{file}: ") for fault in raised.value.faults]


def cluster(*nodes: NodeView) -> ClusterView:
    """Nodes as given."""
    return ClusterView(nodes)


def rack(pool: str, trays: int) -> list[NodeView]:
    """GB200 trays: 4 GPUs of 186 GiB, 144 cores, 894 GiB (960 GB) of memory."""
    return [NodeView(f"{pool}-{n}", 144, 4, 894, 186, labels={"pool": pool}) for n in range(trays)]


H200 = ClusterView((NodeView("h200", 192, 8, 2015, 131),))
GB200 = ClusterView((*rack("prefill", 16), *rack("decode", 16)))
FOUR_CORES = ClusterView((NodeView("node", 4, memory_gib=16),))

Faults = Callable[..., list[str]]
