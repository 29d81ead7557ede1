"""`vllm-deepinfer bench scheduler`: our scheduler against stock's settings, in turn, on real CPU engines."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_deepinfer.bench.report import Report
from vllm_deepinfer.bench.scheduler.figures import Changing, Measured, figures
from vllm_deepinfer.bench.scheduler.series import charts, series
from vllm_deepinfer.bench.scheduler.settings import Fixed, full_grid, quick_grid
from vllm_deepinfer.bench.scheduler.traffic import MIXES, Mix
from vllm_deepinfer.policy.itl_control import quantile
from vllm_deepinfer.policy.step_cost import AttentionBound, StepCost

from ...bench.engine_process import EngineProcess
from . import models


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        rounds: of every setting. seconds: of every window; warm_up: before it.
        decodes: numbers of endless requests, by model. mixes: by model.
        targets: the stock settings whose measured p99 ITL becomes a target of ours.
        stream: seconds of the open stream.
        patience: seconds, per model, after which disturbed windows are no longer taken again.
    """

    rounds: int
    seconds: float
    warm_up: float
    grid: tuple[Fixed, ...]
    decodes: Mapping[str, tuple[int, ...]]
    mixes: Mapping[str, tuple[str, ...]]
    targets: tuple[Fixed, ...]
    stream: float
    patience: float


ALL = tuple(mix.name for mix in MIXES)
QUICK = Plan(
    rounds=1,
    seconds=2.5,
    warm_up=0.3,
    grid=tuple(quick_grid()),
    decodes={models.DENSE: (4, 16), models.V41: (4,)},
    mixes={models.DENSE: ALL, models.V41: ("mixed",)},
    targets=(Fixed(128), Fixed(512)),
    stream=15.0,
    patience=60.0,
)
FULL = Plan(
    rounds=3,
    seconds=8.0,
    warm_up=1.0,
    grid=tuple(full_grid()),
    decodes={models.DENSE: (1, 4, 16), models.V41: (1, 4, 16)},
    mixes={models.DENSE: ALL, models.V41: ALL},
    targets=(Fixed(128), Fixed(256), Fixed(512), Fixed(1024)),
    stream=60.0,
    patience=1_800.0,
)
CHANGING_DECODES = STREAM_DECODES = 4
RETAKES = 3
DISTURBED = 0.05  # of all cores: threads that meet at barriers lose a factor of ten to a neighbour
STREAM_LOAD = 0.6  # of what the best setting that keeps the target prefills


def run(quick: bool, json: Path | None) -> int:
    """Measure, print the table, write the report, and beside it the charts."""
    plan, progress, measured = QUICK if quick else FULL, Console(stderr=True), Measured()
    measured.grid = plan.grid
    states = {}
    with tempfile.TemporaryDirectory(prefix="bench-scheduler-") as folder:
        for name in models.MODELS:
            progress.print(f"bench scheduler: starting {name}")
            path = models.write(name, Path(folder), quick)
            command = [sys.executable, "-m", f"{__package__}.worker", name, str(path)]
            with ExitStack() as stack:
                engine = stack.enter_context(EngineProcess(name, command))
                engine.wait_until_up()
                states[name] = dict(engine.state)
                Bench(engine, name, plan, measured, progress).measure()
    report = Report(
        name="scheduler",
        settings={**_plain(plan, states), "dense": models.dense_config(quick)},
        rounds=plan.rounds,
        figures=figures(measured),
        series=series(measured),
    )
    report.finish(json)
    if json is not None:
        for suffix, chart in charts(measured).items():
            json.with_name(f"{json.stem}-{suffix}.svg").write_text(chart)
    return 0


class Bench:
    """All measurements on one model."""

    def __init__(
        self, engine: EngineProcess, model: str, plan: Plan, measured: Measured, progress: Console
    ) -> None:
        self._engine, self._model, self._plan = engine, model, plan
        self._measured, self._progress, self._spent = measured, progress, 0.0
        mixes = [mix.divided(models.DIVIDED[model]) for mix in MIXES if mix.name in plan.mixes[model]]
        self._mixes = {mix.name: mix for mix in mixes}
        measured.mixes[model] = self._mixes

    def measure(self) -> None:
        """Learn, sweep, and on the dense model everything that one model is enough for."""
        self._learn()
        for number in range(self._plan.rounds):
            self._sweep(number)
        if self._model == models.DENSE:
            for number in range(self._plan.rounds):
                self._changing(number)
            self._stream()
            self._overhead()
        learned = self._engine.ask("learned")
        if learned:
            self._measured.errors[self._model] = learned["errors"]
            self._measured.costs[self._model] = cost_of(learned["cost"])

    def _learn(self) -> None:
        """What a server has behind it after its first minute: a fit, and a margin."""
        self._progress.print(f"bench scheduler: {self._model} learns its cost")
        for decodes in self._plan.decodes[self._model]:
            for mix in self._mixes.values():
                self._closed({"target_ms": 80.0}, mix, 100, decodes)

    def _sweep(self, number: int) -> None:
        """Every setting in every cell, shuffled; then ours at the p99 that some of them reached."""
        cells = [(mix, d) for mix in self._mixes for d in self._plan.decodes[self._model]]
        rng = random.Random(number)
        for name, decodes in rng.sample(cells, len(cells)):
            self._progress.print(
                f"bench scheduler: round {number + 1}, {self._model}, {name}, {decodes} decodes"
            )
            for setting in rng.sample(self._plan.grid, len(self._plan.grid)):
                self._cell(name, decodes, setting.label, asdict(setting), None, number)
            for matched in self._plan.targets:
                side = self._measured.cells.sides[self._model, name, decodes][matched.label]
                ours = self._measured.cells.sides[self._model, name, decodes].get(f"as {matched.label}")
                target = ours.target if ours and ours.target else side.p99  # the same in every round
                self._cell(name, decodes, f"as {matched.label}", {"target_ms": 1e3 * target}, target, number)

    def _cell(
        self, mix: str, decodes: int, label: str, setting: Any, target: float | None, number: int
    ) -> None:
        found = self._closed(setting, self._mixes[mix], number, decodes)
        self._measured.cells.add(
            (self._model, mix, decodes),
            label,
            target,
            found["tokens"],
            found["seconds"],
            found["periods"],
            found["use"],
        )

    def _changing(self, number: int) -> None:
        """Short, mixed, long, short: the target is what a chunk of 512 reaches on the long prompts."""
        self._progress.print(f"bench scheduler: round {number + 1}, {self._model}, changing traffic")
        cells = self._measured.cells.sides
        target = cells[self._model, "long", CHANGING_DECODES]["512"].p99
        changing = Changing(target)
        long = cells[self._model, "long", CHANGING_DECODES]
        near = [s for s in self._plan.grid if long[s.label].p99 <= 1.3 * target]  # others break it for sure
        settings = [(s.label, asdict(s)) for s in near]
        rng = random.Random(number)
        for label, setting in rng.sample(
            [*settings, ("ours", {"target_ms": 1e3 * target})], len(settings) + 1
        ):
            phases = self._engine.ask(
                "changing",
                setting=setting,
                mixes=[list(_fields(mix)) for mix in self._mixes.values()],
                seed=number,
                decodes=CHANGING_DECODES,
                seconds=self._plan.seconds,
            )
            found = [(p["tokens"], p["seconds"], p["periods"]) for p in phases]
            if label == "ours":
                changing.ours = found
            else:
                changing.stock[label] = found
        self._measured.changing.append(changing)

    def _stream(self) -> None:
        """One Poisson stream of mixed prompts, for stock settings that keep the target and for ours."""
        cell = self._measured.cells.sides[self._model, "mixed", STREAM_DECODES]
        target = cell["512"].p99
        keeping = [s for s in cell.values() if s.target is None and s.p99 <= 1.1 * target]
        mix = self._mixes["mixed"]
        lengths = mix.lengths(0)
        mean = sum(next(lengths) for _ in range(1_000)) / 1_000
        rate = STREAM_LOAD * max(s.throughput for s in keeping) / mean
        arrivals = mix.arrivals(0, rate, max(self._plan.stream, 8 / rate))
        grid = {s.label: asdict(s) for s in self._plan.grid}
        plain = sorted((s for s in keeping if "/" not in s.label), key=lambda s: -s.throughput)[:2]
        chosen = [*plain, *(s for s in keeping if "/" in s.label)]  # thresholds are what helps TTFT
        settings = {**{s.label: grid[s.label] for s in chosen}, "ours": {"target_ms": 1e3 * target}}
        self._measured.ttft_target = target
        for label, setting in settings.items():
            self._progress.print(f"bench scheduler: stream of {len(arrivals)} prompts, {label}")
            found = self._engine.ask("opened", setting=setting, arrivals=arrivals, decodes=STREAM_DECODES)
            self._measured.ttft[label] = found["ttft"]
            self._measured.itl[label] = quantile(found["periods"], 0.99)

    def _overhead(self) -> None:
        self._progress.print("bench scheduler: schedule() at 64 running and 64 waiting")
        taken: dict[str, list[float]] = {"stock": [], "ours": []}
        settings = {"stock": {"chunk": models.LARGEST_CHUNK, "threshold": 64}, "ours": {"target_ms": 60.0}}
        for _ in range(2):
            for side, setting in settings.items():
                taken[side] += self._engine.ask(
                    "schedule_times", setting=setting, running=64, waiting=64, steps=40
                )
        self._measured.overhead = taken["stock"], taken["ours"]

    def _closed(self, setting: Any, mix: Mix, seed: int, decodes: int) -> dict[str, Any]:
        """A window; taken again, while patience lasts, if a neighbour used the cores that it needs."""
        for attempt in range(1 + RETAKES):
            began = time.monotonic()
            found: dict[str, Any] = self._engine.ask(
                "closed",
                setting=setting,
                mix=list(_fields(mix)),
                seed=seed,
                decodes=decodes,
                seconds=self._plan.seconds,
                warm_up=self._plan.warm_up,
            )
            disturbed = self._engine.state["threads"] > 1 and (found["foreign"] or 0.0) > DISTURBED
            if not disturbed or attempt == RETAKES or self._spent > self._plan.patience:
                break
            self._spent += time.monotonic() - began
        self._measured.disturbed += disturbed
        return found


def cost_of(saved: dict[str, Any]) -> StepCost:
    """From the wire."""
    return StepCost(**{**saved, "attention": AttentionBound(**saved["attention"])})


def _fields(mix: Mix) -> tuple[str, int, int]:
    return mix.name, mix.shortest, mix.longest


def _plain(plan: Plan, states: dict[str, Any]) -> dict[str, Any]:
    return {
        "engines": states,
        "rounds": plan.rounds,
        "seconds": plan.seconds,
        "grid": [setting.label for setting in plan.grid],
        "decodes": {model: list(numbers) for model, numbers in plan.decodes.items()},
        "mixes": {model: list(names) for model, names in plan.mixes.items()},
        "targets": [setting.label for setting in plan.targets],
        "stream": plan.stream,
        "patience": plan.patience,
    }
