"""Runs every part and puts the figures together. A part that cannot run leaves its figures null, with the
reason.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from pydantic import JsonValue

from vllm_deepinfer.bench.report import Figure, Report
from vllm_deepinfer.bench.routing import outside, perfect
from vllm_deepinfer.bench.routing.measure import Pass, quantile
from vllm_deepinfer.bench.routing.policies import OTHERS, OURS
from vllm_deepinfer.bench.routing.rounds import PATIENCE_S, Results, compare, observe
from vllm_deepinfer.bench.routing.streams import STREAMS, TOKENS, Cores, StreamBench
from vllm_deepinfer.bench.routing.system import (
    POOLS,
    Say,
    System,
    make_model,
    recipe_of,
    replay,
    running,
    simulated_of,
)
from vllm_deepinfer.bench.routing.trace import SCALE, Shape, draw

SHAPE = Shape(rate=16.0, seconds=8.0)
AGGREGATED = Shape(rate=14.0, seconds=8.0)
BACKLOG = Shape(rate=80.0, seconds=2.5)
"""Far more than the pools can do at once: they are busy until the last answer."""
BACKLOG_PATIENCE_S = 60.0
Name = tuple[str, str, str]
ROUTING: list[Name] = [
    ("p99_ttft_ratio_vs_best_policy", "ratio", "<= 0.9"),
    ("p99_itl_ratio_vs_best_policy", "ratio", "<= 0.9"),
    ("balance_vs_perfect", "ratio", ">= 0.85"),
    ("lost_requests", "requests", "= 0"),
    ("duplicated_tokens", "tokens", "= 0"),
]
STREAMING: list[Name] = [
    ("stream_tokens_per_s_per_core", "tokens/s", ">= 15000"),
    ("stream_cpu_vs_in_process", "ratio", "<= 1.5"),
]


class Parts:
    """Collects figures and series of one run."""

    def __init__(self, quick: bool, say: Say) -> None:
        self.rounds = 3 if quick else 5
        self.quick, self.say = quick, say
        self.figures: list[Figure] = []
        self.series: dict[str, JsonValue] = {}

    def run(self, title: str, names: Sequence[Name], part: Callable[[], None]) -> None:
        """Run a part; `names` are its figures. One that fails is reported."""
        self.say(title)
        before = len(self.figures)
        try:
            part()
        except Exception as error:
            del self.figures[before:]
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]
            self.say(f"not measured: {reason}")
            self.series[f"not measured: {title}"] = reason
            self.figures += [Figure.missing(name, unit, reason, target) for name, unit, target in names]

    def add(self, name: Name, rounds: Sequence[float]) -> None:
        """A figure from its rounds."""
        self.figures.append(Figure.measured(name[0], rounds, name[1], name[2]))


def report(quick: bool, say: Say = lambda text: None) -> Report:
    """Measure everything. Takes about six minutes if `quick`."""
    parts = Parts(quick, say)
    allowed = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="vdi-routing-") as name:
        folder = Path(name)
        model = make_model(folder)
        parts.run("prefill and decode pools", ROUTING, lambda: _pools(parts, folder, model))
        cores = Cores(allowed[-1], allowed[0])
        parts.run("streaming", STREAMING, lambda: _streams(parts, folder, model, cores, len(allowed)))
        parts.run(f"one pool, beside {outside.NAME}", (), lambda: _outside(parts, folder, model))
    settings: dict[str, JsonValue] = {
        "pools": {name: {role: pool[0] for role, pool in pools.items()} for name, pools in POOLS.items()},
        "traffic": asdict(SHAPE),
        "traffic_one_pool": asdict(AGGREGATED),
        "backlog": asdict(BACKLOG),
        "published_tokens_per_token": SCALE,
        "streams": STREAMS,
        "tokens_per_streamed_answer": TOKENS,
        "quick": quick,
    }
    return Report(
        name="routing",
        settings=settings,
        rounds=parts.rounds,
        figures=tuple(parts.figures),
        series=parts.series,
    )


def _pools(parts: Parts, folder: Path, model: Path) -> None:
    recipe = recipe_of("routing", model, POOLS["disaggregated"])
    with running(folder, recipe, parts.say) as system:
        results = compare(system, folder, SHAPE, parts.rounds, parts.say)
        parts.say("backlog, beside an assignment made offline")
        backlogs = [_backlog(system, folder, seed) for seed in range(1 if parts.quick else 3)]
    for name, of in ((ROUTING[0], _p99_ttft), (ROUTING[1], _p99_itl)):
        best, ratios = results.ratios(of)
        parts.add(name, ratios)
        parts.series[f"best_other_of_{name[0]}"] = best
    parts.add(ROUTING[2], [offline / ours for ours, offline, _ in backlogs])
    whole = [one for passes in results.passes.values() for one in passes]
    lost = sum(one.lost for one in whole) + sum(one.unfinished for one in results.passes[OURS])
    parts.add(ROUTING[3], [lost + sum(failed for _, _, failed in backlogs)])
    parts.add(ROUTING[4], [sum(one.doubled for one in whole)])
    parts.series["policies"] = _series(results)
    parts.series["backlog_s"] = [{"ours": ours, "offline": offline} for ours, offline, _ in backlogs]


def _p99_ttft(one: Pass) -> float:
    return quantile(one.ttft, 0.99)


def _p99_itl(one: Pass) -> float:
    return quantile(one.itl, 0.99)


def _backlog(system: System, folder: Path, seed: int) -> tuple[float, float, int]:
    """Seconds to the last token by our policy and by the offline assignment, and requests lost."""
    system.follow(OURS)
    arrivals = draw(BACKLOG, 1000 + seed)
    records = replay(folder, system.ports, arrivals, BACKLOG_PATIENCE_S)
    ended = [record.ended for record in records if record.ended is not None]
    lost = sum(record.ended is None or bool(record.fault) for record in records)
    if not ended:
        raise RuntimeError("no request of the backlog was answered")
    offline = perfect.makespan(arrivals, POOLS["disaggregated"], simulated_of)
    return max(ended), offline, lost


def _streams(parts: Parts, folder: Path, model: Path, cores: Cores, count: int) -> None:
    if count < 2:
        raise RuntimeError("this needs two cores: one for the gateway, one for its clients and engine")
    bench = StreamBench(folder, model, cores, 2.0 if parts.quick else 5.0)
    with bench.system(parts.say) as system:
        rounds = [bench.measure(system) for _ in range(parts.rounds)]
    parts.add(STREAMING[0], [one.tokens_per_core for one in rounds])
    parts.add(STREAMING[1], [one.ratio for one in rounds])
    parts.series["stream_cpu_us_per_token"] = [asdict(one) for one in rounds]


def _outside(parts: Parts, folder: Path, model: Path) -> None:
    count, cost = POOLS["aggregated"]["aggregated"]
    policies = outside.POLICIES[:2] if parts.quick else outside.POLICIES
    found: dict[str, list[JsonValue]] = {OURS: [], **{policy: [] for policy in policies}}
    rounds = 1 if parts.quick else 3
    with running(folder, recipe_of("beside", model, POOLS["aggregated"]), parts.say) as system:
        system.go_first()
        for seed in range(rounds):
            one, _ = observe(system, folder, system.ports, AGGREGATED, seed, PATIENCE_S)
            found[OURS].append(dict(one.quantiles()))
    with outside.doors(folder, model, count, cost) as ports:
        for seed in range(rounds):
            for policy in policies:
                parts.say(f"{outside.NAME}, {policy}")
                with outside.router(folder, ports, policy) as port:
                    one, _ = observe(None, folder, [port], AGGREGATED, seed, PATIENCE_S)
                found[policy].append(dict(one.quantiles()))
    parts.series["one_pool_beside_vllm_router"] = {name: list(rows) for name, rows in found.items()}


def _series(results: Results) -> dict[str, JsonValue]:
    return {
        policy: [
            {**one.quantiles(), "busy_cores": asdict(share)}
            for one, share in zip(results.passes[policy], results.shares[policy], strict=True)
        ]
        for policy in (OURS, *OTHERS)
    }
