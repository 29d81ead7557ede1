"""`vllm-deepinfer bench routing`: pools in a real Ray Serve, routed by ours and by other policies in turn."""

from __future__ import annotations

from pathlib import Path


def run(quick: bool, json: Path | None) -> int:
    """Measure, print the table, write the report to `json` if given. Returns 0."""
    from rich.console import Console

    from vllm_deepinfer.bench.routing.report import report

    console = Console(stderr=True)
    result = report(quick, lambda text: console.print(f"[dim]{text}[/dim]"))
    result.finish(json)
    return 0
