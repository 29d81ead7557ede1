"""`vllm-deepinfer serve RECIPE`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.recipes.command import look
from vllm_deepinfer.recipes.inspect import inspect_recipe
from vllm_deepinfer.recipes.rehearsal import rehearsal
from vllm_deepinfer.recipes.schema import Recipe
from vllm_deepinfer.recipes.summary import summary

if TYPE_CHECKING:
    from vllm_deepinfer.cluster.application.launch import Application

MISSING = "`serve` needs Ray: pip install 'vllm-deepinfer[cluster]'."


def serve(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The YAML file.")],
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Of the first gateway, instead of the recipe's; 0: any."),
    ] = None,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help="Simulated engines of the recipe's sizes, in a cluster on this machine: no GPU.",
        ),
    ] = False,
) -> int:
    """Serve a recipe: its pools, placed by Ray, and the gateways in front. Ctrl-C stops all of it.

    SIGUSR1 reads the file again: pools that have changed are replaced, one by one, and requests go on.
    """
    began = time.monotonic()
    try:
        from vllm_deepinfer.cluster.application.launch import (
            Application,
            stop_signals,
            update_signal,
            wait_for,
        )
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise UserError(MISSING) from None

    def changed(given: Recipe) -> Recipe:
        return on_port(rehearsal(given) if rehearse else given, port)

    found, view = inspect_recipe(recipe, lambda ray: look(None, ray), changed)
    console = Console()
    console.print(summary(found, view))

    def say(line: str) -> None:
        typer.echo(f"{time.monotonic() - began:4.0f} s  {line}")

    def tick() -> None:
        application.watch()
        if wanted.is_set():
            wanted.clear()
            update(application, recipe, changed, say)

    with stop_signals() as stop, update_signal() as wanted:
        application = Application(found, say=say, stopped=stop.is_set)
        try:
            application.start()
            typer.echo(ready(application.urls, application.metrics_url, found))
            wait_for(stop, 1.0, tick)
            say("stopping: running answers end first; the same signal again stops at once")
        except KeyboardInterrupt:
            say("stopping at once")
        finally:
            application.stop()
    return 0


def update(
    application: Application, file: Path, change: Callable[[Recipe], Recipe], say: Callable[[str], None]
) -> None:
    """Read the recipe again and serve it. What is wrong with it is told, and nothing changes."""
    say(f"reading {file} again")
    try:
        # Against no cluster: ports and cores are taken, by this application itself.
        found, _ = inspect_recipe(file, change=change)
        application.update(found)
    except UserError as error:
        typer.echo(f"vllm-deepinfer: {error}", err=True)
        return
    say("the recipe is served as it is now")


def on_port(recipe: Recipe, port: int | None) -> Recipe:
    """The recipe with its gateways on other ports."""
    if port is None:
        return recipe
    return recipe.model_copy(update={"gateway": recipe.gateway.model_copy(update={"port": port})})


def ready(urls: list[str], metrics: str, recipe: Recipe) -> str:
    """What a user can do now."""
    body = f'{{"model": "{recipe.served_names[0]}", "stream": true, "max_tokens": 32,'
    return (
        f"\nReady: {', '.join(urls)}\nStatus page: {urls[0]}/status   Metrics of all processes: {metrics}\n\n"
        f"  curl -N {urls[0]}/v1/chat/completions -H 'Content-Type: application/json' -d \\\n"
        f'    \'{body}\n      "messages": [{{"role": "user", "content": "Hello"}}]}}\'\n'
    )
