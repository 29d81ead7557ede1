"""The command line `vllm-deepinfer`. A sub-command's module is imported only when that sub-command runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_deepinfer.errors import UserError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

COMMANDS = "vllm_deepinfer.command"
"""Entry points of sub-commands that other packages bring."""

# Arguments are passed on as they are, `--help` too: the sub-command's own module knows what they mean.
_PASS_ON: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("vllm-deepinfer"))
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """DeepSeek-V4.1 serving around vLLM."""


@app.command("tiny-checkpoint", context_settings=_PASS_ON)
def tiny_checkpoint(context: typer.Context) -> int:
    """Write a small DeepSeek-V4.1 checkpoint."""
    return pass_on("vllm_deepinfer.checkpoint.command:tiny_checkpoint", context)


@app.command(context_settings=_PASS_ON)
def gateway(context: typer.Context) -> int:
    """Serve Chat Completions, Responses and Messages on one engine."""
    return pass_on("vllm_deepinfer.gateway.command:gateway", context)


@app.command("gateway-key", context_settings=_PASS_ON)
def gateway_key(context: typer.Context) -> int:
    """Make an API key for the gateway."""
    return pass_on("vllm_deepinfer.gateway.command:gateway_key", context)


@app.command(context_settings=_PASS_ON)
def check(context: typer.Context) -> int:
    """Say all that is wrong with a recipe, or what it would place."""
    return pass_on("vllm_deepinfer.recipes.command:check", context)


@app.command(context_settings=_PASS_ON)
def serve(context: typer.Context) -> int:
    """Serve a recipe: pools placed by Ray, gateways in front."""
    return pass_on("vllm_deepinfer.cluster.application.command:serve", context)


@app.command(context_settings=_PASS_ON)
def calibrate(context: typer.Context) -> int:
    """Fit a drafter's confidences to what the target accepts."""
    return pass_on(plugged_in("calibrate"), context)


@app.command(context_settings=_PASS_ON)
def store(context: typer.Context) -> int:
    """Look after a prefix store: stat, ls, verify, gc, rm, bench."""
    return _invoke(
        importlib.import_module("vllm_deepinfer.store.command").app, context.args, context.command_path
    )


@app.command()
def bench(
    name: Annotated[
        str | None, typer.Argument(help="The benchmark; left out, the installed ones are listed.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="The same figures from fewer rounds: minutes.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report here.")
    ] = None,
) -> int:
    """Run a benchmark and print its figures."""
    from vllm_deepinfer.bench import registry

    if name is None:
        for known, target in sorted(registry.installed().items()):
            typer.echo(f"{known:16} {target.value}")
        return 0
    return registry.run(name, quick, json)


def plugged_in(name: str) -> str:
    """`module:function` of a sub-command that comes with another package, by entry point.

    Raises:
        UserError: That package is not installed.
    """
    found = entry_points(group=COMMANDS, name=name)
    if not found:
        raise UserError(f"{name} comes with vllm-deepinfer-plugins, which is not installed here.")
    return next(iter(found)).value


def pass_on(target: str, context: typer.Context) -> int:
    """Run `module:function`, a function in typer's style, on the arguments of this sub-command.

    Returns its exit status; None counts as 0.
    """
    module, _, function = target.partition(":")
    # Rich's table cuts names such as --served-model-name in a terminal of 80 columns; plain text does not.
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    command.command(context.info_name)(getattr(importlib.import_module(module), function))
    return _invoke(command, context.args, prog_name=context.command_path)


def _invoke(command: Callable[..., Any], arguments: Sequence[str], prog_name: str) -> int:
    result = command(list(arguments), prog_name=prog_name, standalone_mode=False)
    return result if isinstance(result, int) else 0


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit status: 0, 2 for a user's mistake, 130 after Ctrl-C.

    A mistake is told in one sentence on standard error. Anything else that goes wrong is a fault of ours and
    keeps its stack trace.
    """
    try:
        return _invoke(app, arguments, prog_name="vllm-deepinfer")
    except UserError as error:
        message, status = str(error), 2
    except typer.TyperException as error:  # a wrong option, argument or sub-command
        message, status = error.format_message(), 2
    except typer.Abort:
        message, status = "Interrupted.", 130
    if message:  # none when the help was printed because no sub-command was named
        print(f"vllm-deepinfer: {message}", file=sys.stderr)
    return status


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))
