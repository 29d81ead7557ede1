"""`vllm-deepinfer check`."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.recipes.cluster_view import ClusterView
from vllm_deepinfer.recipes.inspect import inspect_recipe
from vllm_deepinfer.recipes.schema import Ray
from vllm_deepinfer.recipes.summary import summary


def check(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The YAML file.")],
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Check also whether it fits: local (this machine, as `serve` would start it), auto, or the "
            "host:port of a Ray cluster. By default local if the recipe starts a cluster of its own.",
        ),
    ] = None,
) -> None:
    """Say all that is wrong with a recipe, or what it would place. Starts nothing."""
    found, view = inspect_recipe(recipe, lambda ray: look(cluster, ray))
    Console().print(summary(found, view))


def look(cluster: str | None, ray: Ray) -> ClusterView | None:
    """The cluster to check against. Raises: UserError when there is none at that address."""
    address = cluster or (ray.address if ray.address == "local" else None)
    if address is None:
        return None
    return ClusterView.of_this_machine(ray) if address == "local" else connected(address)


def connected(address: str) -> ClusterView:
    """The nodes of a running Ray cluster. Raises: UserError."""
    try:
        import ray
    except ImportError:
        raise UserError(
            f"--cluster {address} needs Ray: pip install 'vllm-deepinfer[cluster]', or --cluster local."
        ) from None
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            ray.init(address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
        try:
            return ClusterView.of_ray(ray.nodes())
        finally:
            ray.shutdown()
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        reason = (str(error).splitlines() or ["no answer"])[0].rstrip(".")
        raise UserError(f"--cluster {address}: no Ray cluster answers there ({reason}).") from None
