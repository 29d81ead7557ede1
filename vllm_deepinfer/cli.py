"""The command line `vllm-deepinfer`. Sub-commands load their modules only when they run."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def root() -> None:
    """DeepSeek-V4.1 serving around vLLM."""


def main() -> None:
    """Entry point of the console script."""
    app()
