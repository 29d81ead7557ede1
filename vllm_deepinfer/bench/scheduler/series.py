"""What the charts draw, as data and as SVG."""

from __future__ import annotations

from typing import Any

from vllm_deepinfer.bench.scheduler.chart import scatter
from vllm_deepinfer.bench.scheduler.figures import Measured, bound
from vllm_deepinfer.policy.itl_control import quantile


def series(measured: Measured) -> dict[str, Any]:
    """Every side of every cell, the bound, the stream and the phases."""
    cells = [
        {
            "model": cell[0],
            "mix": cell[1],
            "decodes": cell[2],
            "setting": side.label,
            "target_ms": side.target and 1e3 * side.target,
            "p99_ms": 1e3 * side.p99,
            "throughput": side.throughput,
            "rounds": side.throughputs,
            "ratio": measured.cells.ratio(cell, side) if side.target else None,
            "bound": bound(measured, cell, side.p99) if side.target else None,
        }
        for cell, sides in measured.cells.sides.items()
        for side in sides.values()
    ]
    stream = [
        {
            "setting": label,
            "prompts": len(times),
            "p50_s": quantile(times, 0.5),
            "p99_s": quantile(times, 0.99),
            "itl_p99_ms": 1e3 * measured.itl[label],
        }
        for label, times in measured.ttft.items()
        if times
    ]
    changing = [
        {
            "target_ms": 1e3 * one.target,
            "setting": label,
            "phases": [
                {"tokens": t, "seconds": s, "p99_ms": 1e3 * quantile(p, 0.99)} for t, s, p in phases if p
            ],
        }
        for one in measured.changing
        for label, phases in [("ours", one.ours), *one.stock.items()]
    ]
    return {
        "cells": cells,
        "stream": stream,
        "changing": changing,
        "disturbed_windows": measured.disturbed,
    }


def charts(measured: Measured) -> dict[str, str]:
    """File-name suffix to SVG: one of throughput for every cell, one of TTFT."""
    found = {}
    for cell, sides in measured.cells.sides.items():
        points: dict[str, list[tuple[float, float, str]]] = {"stock": [], "ours": []}
        for side in sides.values():
            points["ours" if side.target else "stock"].append((1e3 * side.p99, side.throughput, side.label))
        model, mix, decodes = cell
        title = f"{model}, {mix} prompts, {decodes} decodes"
        found[f"{model}-{mix}-{decodes}"] = scatter(
            title, "p99 ITL in ms", "prefill tokens per second", points
        )
    if measured.ttft:
        named = {
            label: [
                (1e3 * measured.itl[label], quantile(times, 0.5), "p50"),
                (1e3 * measured.itl[label], quantile(times, 0.99), "p99"),
            ]
            for label, times in measured.ttft.items()
            if times
        }
        found["ttft"] = scatter("Time to first token", "p99 ITL in ms", "seconds", named)
    return found
