"""`vllm-deepinfer bench store`: the prefix store beside the disk and the memory that it stands on."""

from __future__ import annotations

from pathlib import Path


def run(quick: bool, json: Path | None) -> int:
    """Measure, print the table, write the report to `json` if given. Returns 0."""
    from rich.console import Console

    from vllm_deepinfer.bench.store.report import report

    console = Console(stderr=True)
    result = report(quick, lambda text: console.print(f"[dim]measuring: {text}[/dim]"))
    result.finish(json)
    return 0
