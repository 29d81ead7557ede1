"""What every check looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm_deepinfer.recipes.cluster_view import ClusterView
from vllm_deepinfer.recipes.facts import ModelFacts
from vllm_deepinfer.recipes.schema import Pool, Recipe


@dataclass(frozen=True)
class Context:
    """Attributes:
    recipe: the recipe. facts: of its model.
    cluster: what it is to run on; None: not said, and then nothing about machines is checked.
    """

    recipe: Recipe
    facts: ModelFacts
    cluster: ClusterView | None = None


Check = Callable[[Context], Iterator[str]]


def argument(pool: Pool, name: str, default: int) -> int:
    """A whole number ≥ 1 among the engine arguments; what is none is another check's business."""
    value: Any = pool.engine_args.get(name, default)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else default


def workers(pool: Pool) -> int:
    """Engine workers of one replica: tensor- and pipeline-parallel ranks."""
    return argument(pool, "tensor_parallel_size", 1) * argument(pool, "pipeline_parallel_size", 1)


def on_cpu(pool: Pool) -> bool:
    """Whether its engines are vLLM on CPUs."""
    return pool.engine == "vllm" and pool.resources.gpus == 0
