"""The command: every setting in turn on one engine, a small batch against brute force, a calibration."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from rich.console import Console

from vllm_deepinfer.bench.report import Report
from vllm_deepinfer.checkpoint.config import V41Config
from vllm_deepinfer.checkpoint.errors import CheckpointError
from vllm_deepinfer.checkpoint.trained import trained_folder
from vllm_deepinfer.errors import UserError

from ..engine_process import EngineFailed, EngineProcess
from ..rounds import QUIET
from . import decisions
from .figures import Measured, charts, other_figures, series, sweep_figures
from .plan import (
    ADAPTIVE,
    BATCHES,
    CONCURRENCY,
    FULL,
    MODEL,
    QUICK,
    SCRIPTED,
    TRAFFIC,
    TRAINED,
    Plan,
    settings,
)
from .successor import write_successor

CELLS = [(traffic, concurrency) for traffic in TRAFFIC for concurrency in CONCURRENCY]
RETAKES = 2
DECISIONS = 400
Say = Callable[[str], None]


def run(quick: bool, json: Path | None) -> int:
    """Measure, print the table, write the report, and beside it the charts."""
    plan, progress = QUICK if quick else FULL, Console(stderr=True)

    def say(what: str) -> None:
        progress.print(f"bench verification: {what}")

    trained = _trained()
    measured = Measured()
    with tempfile.TemporaryDirectory(prefix="bench-verification-") as folder, ExitStack() as stack:
        say("writing the checkpoint whose answers are known")
        random_weights = write_successor(Path(folder) / "model", MODEL)
        try:
            scripted = _start(SCRIPTED, random_weights, plan, stack, say)
            sweep = Sweep(scripted, SCRIPTED, plan, measured, say)
            sweep.learn()
            batches = [_brute_force(scripted, batch, plan, say) for batch in range(len(BATCHES))]
            engine, drafter = scripted, SCRIPTED
            if trained is not None:
                scripted.close()
                engine, drafter = _start(TRAINED, trained, plan, stack, say), TRAINED
                sweep = Sweep(engine, drafter, plan, measured, say)
                sweep.learn()
            rounds = sweep.run()
            say("a calibration")
            calibrated = engine.ask("calibrated", rounds=plan.rounds_of_ece)
        except EngineFailed as error:
            raise UserError(f"bench verification: {error}.") from None
    policy, whole = decisions.times(DECISIONS)
    before, after = ({int(k): v for k, v in calibrated[side].items()} for side in ("before", "after"))
    report = Report(
        name="verification",
        settings=_settings(plan, drafter),
        rounds=rounds,
        figures=(
            *sweep_figures(measured),
            *other_figures([batch["ratio"] for batch in batches], policy, before, after),
        ),
        series={
            "cells": list[JsonValue](series(measured)),
            "brute_force": list[JsonValue](batches),
            "calibration": calibrated,
            "judge_ms_256x5": sorted(whole)[len(whole) // 2],
            "foreign_cpu_share_max": max(measured.foreign),
        },
    )
    report.finish(json)
    if (number := sum(each > QUIET for each in measured.foreign)) > 0:
        say(f"other processes disturbed {number} of {len(measured.foreign)} slices that were kept")
    if json is not None:
        for traffic, chart in charts(measured).items():
            json.with_name(f"{json.stem}-{traffic}.svg").write_text(chart)
    return 0


class Sweep:
    """All settings in all cells, in a new order every round."""

    def __init__(self, engine: EngineProcess, drafter: str, plan: Plan, measured: Measured, say: Say) -> None:
        self._engine, self._drafter, self._plan = engine, drafter, plan
        self._measured, self._say = measured, say

    def learn(self) -> None:
        """What a server has behind it after its first minutes: steps of many sizes, and what was accepted."""
        self._say(f"adaptive verification of a drafter that is {self._drafter} learns what steps cost here")
        for cell in CELLS:
            for setting in settings(cell[1], self._drafter, self._plan):
                if setting.startswith(ADAPTIVE):
                    self._slice(setting, cell, 0, lambda: False, warm=3)

    def run(self) -> int:
        """Returns the rounds that were taken."""
        begin = time.monotonic()
        for number in range(1, self._plan.rounds + 1):
            rng = random.Random(number)
            for cell in rng.sample(CELLS, len(CELLS)):
                self._say(f"round {number}, {cell[0]}, {cell[1]} at a time")
                names = settings(cell[1], self._drafter, self._plan)
                for setting in rng.sample(names, len(names)):
                    found = self._slice(
                        setting, cell, number, lambda: time.monotonic() - begin < self._plan.patience
                    )
                    self._measured.add(cell, setting, found["rate"], found["foreign"])
            if time.monotonic() - begin > self._plan.budget * number / (number + 1):
                break  # another round would end behind the budget
        return number

    def _slice(
        self, setting: str, cell: tuple[str, int], number: int, patient: Callable[[], bool], warm: int = 1
    ) -> dict[str, Any]:
        """Again, up to twice, when something else used the cores meanwhile: the least disturbed one."""
        best: dict[str, Any] | None = None
        for _ in range(1 + RETAKES):
            found: dict[str, Any] = self._engine.ask(
                "measure",
                setting=setting,
                traffic=cell[0],
                concurrency=cell[1],
                seed=number,
                steps=warm * self._plan.steps,
                seconds=self._plan.seconds,
            )
            if best is None or (found["foreign"] or 0.0) < (best["foreign"] or 0.0):
                best = found
            if (best["foreign"] or 0.0) <= QUIET or not patient():
                break
        assert best is not None
        return best


def _trained() -> Path | None:
    """The trained checkpoint, if there is one with a drafter."""
    try:
        folder = trained_folder()
    except CheckpointError:
        return None
    return folder if V41Config.load(folder).text_config.num_nextn_predict_layers else None


def _start(drafter: str, model: Path, plan: Plan, stack: ExitStack, say: Say) -> EngineProcess:
    say(f"starting an engine with a drafter that is {drafter}")
    command = [sys.executable, "-m", f"{__package__}.worker", drafter, str(model), str(plan.outputs)]
    engine = stack.enter_context(EngineProcess(drafter, command))
    engine.wait_until_up()
    return engine


def _brute_force(engine: EngineProcess, batch: int, plan: Plan, say: Say) -> dict[str, Any]:
    say(f"brute force, batch {batch + 1} of {len(BATCHES)}")
    found: dict[str, Any] = engine.ask("optimum", batch=batch, steps=plan.trace)
    return found


def _settings(plan: Plan, drafter: str) -> dict[str, JsonValue]:
    shown: dict[str, JsonValue] = {"drafter": drafter}
    for name, value in asdict(plan).items():
        shown[name] = list(value) if isinstance(value, tuple) else value
    return shown | {"model": MODEL.model_dump(mode="json")}
