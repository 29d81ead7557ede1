"""Runs every part and puts the figures together. A part that cannot run leaves its figures null, with the
reason.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from vllm_deepinfer.bench.gateway import api, saturation, tokenise
from vllm_deepinfer.bench.gateway.doors import (
    ROUTER,
    ROUTER_VERSION,
    STEP_MS,
    Cores,
    Sample,
    Workshop,
    quantile,
)
from vllm_deepinfer.bench.gateway.soak import soak
from vllm_deepinfer.bench.report import Figure, Report

STREAMS = 256
Say = Callable[[str], None]


class Parts:
    """Collects figures and series of one run."""

    def __init__(self, quick: bool, say: Say) -> None:
        self.rounds = 5 if quick else 9
        self.quick = quick
        self.figures: list[Figure] = []
        self.series: dict[str, JsonValue] = {}
        self._say = say

    def run(self, title: str, names: Sequence[tuple[str, str, str]], part: Callable[[], None]) -> None:
        """Run a part; `names` are its figures with unit and target. One that fails is reported."""
        self._say(title)
        before = len(self.figures)
        try:
            part()
        except (OSError, RuntimeError) as error:
            del self.figures[before:]
            reason = str(error).strip().splitlines()[-1][:300]
            self._say(f"not measured: {reason}")
            self.figures += [Figure.missing(name, unit, reason, target) for name, unit, target in names]

    def add(self, name: str, rounds: Sequence[float], unit: str, target: str) -> None:
        """A figure from its rounds."""
        self.figures.append(Figure.measured(name, rounds, unit, target))


def report(quick: bool, say: Say = lambda text: None) -> Report:
    """Measure everything. Takes five minutes if `quick`."""
    parts = Parts(quick, say)
    allowed = sorted(os.sched_getaffinity(0))
    cores = Cores(door=allowed[-1], rest=allowed[0])
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(Path(folder), cores)
        _tokenise(parts)
        _doors(parts, workshop, len(allowed))
        _saturation(parts, workshop)
        _api(parts, workshop)
    _soak(parts)
    settings: dict[str, JsonValue] = {
        "streams": STREAMS,
        "step_ms": STEP_MS,
        "door_core": cores.door,
        "router": f"{ROUTER} {ROUTER_VERSION}",
        "quick": quick,
    }
    return Report(
        name="gateway",
        settings=settings,
        rounds=parts.rounds,
        figures=tuple(parts.figures),
        series=parts.series,
    )


def _tokenise(parts: Parts) -> None:
    names = [("tokenize_speedup_1mb", "ratio", ">= 2.3"), ("next_turn_fraction", "ratio", "< 0.05")]

    def part() -> None:
        rounds = tokenise.run(parts.rounds)
        parts.add("tokenize_speedup_1mb", [r.serial / r.parallel for r in rounds], "ratio", ">= 2.3")
        parts.add("next_turn_fraction", [r.next_turn / r.conversation for r in rounds], "ratio", "< 0.05")
        parts.series["tokenise_s"] = [asdict(r) for r in rounds]

    parts.run("tokenising 1 MB and the next turn of a long conversation", names, part)


def _doors(parts: Parts, workshop: Workshop, cores: int) -> None:
    names = [
        ("cpu_per_token_vs_router_256", "ratio", "<= 1.0"),
        ("added_ttft_p50_ms", "ms", "<= 2.0"),
        ("added_ttft_p99_vs_router", "ratio", "<= 1.0"),
    ]

    def part() -> None:
        if cores < 2:
            raise RuntimeError("this needs two cores: one for the front door, one for its clients and engine")
        with ExitStack() as stack:
            ours, router = stack.enter_context(workshop.ours()), stack.enter_context(workshop.router())
            pairs = [
                (workshop.measure(ours, STREAMS, 4.0), workshop.measure(router, STREAMS, 4.0))
                for _ in range(parts.rounds)
            ]
        _door_figures(parts, pairs)

    parts.run(f"our front door and {ROUTER} in turn, {STREAMS} streams", names, part)


def _door_figures(parts: Parts, pairs: list[tuple[Sample, Sample]]) -> None:
    cpu = [ours.cpu_us / router.cpu_us for ours, router in pairs]
    parts.add("cpu_per_token_vs_router_256", cpu, "ratio", "<= 1.0")
    parts.add("added_ttft_p50_ms", [quantile(ours.added_ms, 0.5) for ours, _ in pairs], "ms", "<= 2.0")
    _p99(parts, pairs)
    for name, samples in (("vllm_deepinfer", [o for o, _ in pairs]), ("router", [r for _, r in pairs])):
        parts.series[name] = [
            {
                "cpu_us_per_token": sample.cpu_us,
                "tokens_per_s": sample.tokens_per_s,
                "added_ttft_ms": {str(q): quantile(sample.added_ms, q) for q in (0.5, 0.9, 0.99)},
            }
            for sample in samples
        ]


def _p99(parts: Parts, pairs: list[tuple[Sample, Sample]]) -> None:
    """Of all rounds together, for both doors: in one round, a single blip of the machine decides a p99."""
    ours, router = (sorted(ms for pair in pairs for ms in pair[door].added_ms) for door in (0, 1))
    ratio = quantile(ours, 0.99) / quantile(router, 0.99)
    rounds = [ratio, *(quantile(a.added_ms, 0.99) / quantile(b.added_ms, 0.99) for a, b in pairs)]
    parts.figures.append(
        Figure(
            name="added_ttft_p99_vs_router",
            value=ratio,
            unit="ratio",
            target="<= 1.0",
            spread=(min(rounds), max(rounds)),
        )
    )
    parts.series["added_ttft_all_rounds_ms"] = {
        name: {"samples": len(values), **{str(q): quantile(values, q) for q in (0.5, 0.9, 0.99, 1.0)}}
        for name, values in (("vllm_deepinfer", ours), ("router", router))
    }


def _saturation(parts: Parts, workshop: Workshop) -> None:
    names = [("saturation_ttft_p99_ratio", "ratio", "<= 3.0")]

    def part() -> None:
        with workshop.ours(max_busy=saturation.MAX_BUSY, seqs=4096) as door:
            rounds = [saturation.measure(workshop, door, 6.0) for _ in range(3 if parts.quick else 5)]
        ratios = [r.saturated_ms / r.unloaded_ms for r in rounds]
        parts.add("saturation_ttft_p99_ratio", ratios, "ratio", "<= 3.0")
        parts.series["saturation"] = [asdict(r) for r in rounds]

    parts.run("times to first token at saturation", names, part)


def _api(parts: Parts, workshop: Workshop) -> None:
    names = [("api_cpu_per_token_vs_vllm", "ratio", "<= 0.5")]

    def part() -> None:
        reason = api.why_not()
        if reason is not None:
            raise RuntimeError(reason)
        bench = api.ApiBench(workshop)
        with bench.ours() as ours, bench.stock() as stock:
            for door in (ours, stock):
                bench.measure(door, 1)
            pairs = [(bench.measure(ours, 4), bench.measure(stock, 4)) for _ in range(parts.rounds)]
        parts.add("api_cpu_per_token_vs_vllm", [a / b for a, b in pairs], "ratio", "<= 0.5")
        parts.series["api_cpu_us_per_token"] = [{"vllm_deepinfer": a, "vllm": b} for a, b in pairs]

    parts.run("our front door and vLLM's server on a tiny real engine, 16 streams", names, part)


def _soak(parts: Parts) -> None:
    names = [("soak_lost_requests", "requests", "= 0"), ("soak_rss_growth", "ratio", "< 0.05")]

    def part() -> None:
        result = asyncio.run(soak(3_000 if parts.quick else 10_000))
        parts.add("soak_lost_requests", [result.lost + sum(result.leaked.values())], "requests", "= 0")
        parts.add("soak_rss_growth", [result.rss_growth], "ratio", "< 0.05")
        found: dict[str, Any] = asdict(result)
        parts.series["soak"] = found

    parts.run("soak", names, part)
