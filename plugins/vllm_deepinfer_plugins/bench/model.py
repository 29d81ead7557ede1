"""`vllm-deepinfer bench model`: our DeepSeek-V4.1 class against vLLM's own CPU class for DeepSeek-V4."""

from __future__ import annotations

import json as jsonlib
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from rich.console import Console

from vllm_deepinfer.bench.report import Figure, Report
from vllm_deepinfer.checkpoint.tiny import write_checkpoint
from vllm_deepinfer.errors import UserError

from . import sizes
from .engine_process import EngineFailed, EngineProcess, worker_command
from .rounds import Pair, Task, disturbed, rates, summary, take_rounds
from .worker import OURS, REPAIRED, SIDES
from .workload import Measurement

QUICK_ROUNDS, FULL_ROUNDS = 5, 15
DECODE_CONTEXT = 512  # prompt tokens of each decoding request
QUICK_OUTPUTS, FULL_OUTPUTS = 33, 65  # the first is not timed
QUICK_PATIENCE, FULL_PATIENCE = 120.0, 1200.0  # seconds of measuring after which disturbed pairs are kept

NOT_MEASURED = {
    "setup_seconds": "this command runs after set-up; `make serve` prints the time that set-up took",
    "first_token_seconds": "this command starts no server; `make serve` prints the time to its first token",
}


def run(quick: bool, json: Path | None) -> int:
    """Measure, print the table, write the report; what cannot be measured is null with its reason."""
    progress = Console(stderr=True)
    rounds = QUICK_ROUNDS if quick else FULL_ROUNDS
    tasks = tasks_of(QUICK_OUTPUTS if quick else FULL_OUTPUTS)
    with tempfile.TemporaryDirectory(prefix="bench-model-") as folder, ExitStack() as stack:
        models = write_models(Path(folder), progress)
        engines, faults = start_engines(models, stack, progress)
        pairs = _measure(engines, tasks, rounds, QUICK_PATIENCE if quick else FULL_PATIENCE, progress)
        profiles = {side: _profile(engine, progress) for side, engine in engines.items()}
    _report(tasks, rounds, pairs, faults, engines, profiles).finish(json)
    _warn_of_neighbours(pairs, progress)
    return 0


def tasks_of(outputs: int) -> list[Task]:
    """The three things that the issue names, by the stem of their figures."""
    decode = {"context": DECODE_CONTEXT, "outputs": outputs}
    return [
        Task("decode_b1", "decode", {"batch": 1, **decode}),
        Task("decode_b8", "decode", {"batch": 8, **decode}),
        Task("prefill_2048", "prefill", {"tokens": 2048}),
    ]


def write_models(folder: Path, progress: Console) -> dict[str, Path]:
    """The checkpoint of each side; V4's is a config alone, because its weights are drawn at start."""
    progress.print("bench model: writing the V4.1 checkpoint")
    ours, other = folder / "v41", folder / "v4"
    write_checkpoint(ours, sizes.v41_options())
    other.mkdir()
    (other / "config.json").write_text(jsonlib.dumps(sizes.v4_config(), indent=2))
    return {OURS: ours, REPAIRED: other}


def start_engines(
    models: Mapping[str, Path], stack: ExitStack, progress: Console
) -> tuple[dict[str, EngineProcess], dict[str, str]]:
    """Start both engines, warm them up and check their answers.

    Returns:
        The engines that work, and for each other side the reason why it does not.

    Raises:
        UserError: None works.
    """
    engines: dict[str, EngineProcess] = {}
    faults: dict[str, str] = {}
    for side in SIDES:
        progress.print(f"bench model: starting {side}")
        engine = stack.enter_context(EngineProcess(side, worker_command(side, models[side])))
        try:
            engine.wait_until_up()
            wrong = engine.ask("check")
        except EngineFailed as error:
            faults[side] = str(error)
            continue
        if wrong:
            faults[side] = f"engine {side!r} gives wrong answers: {'; '.join(wrong)}"
        else:
            engines[side] = engine
    if not engines:
        raise UserError(f"bench model can measure nothing here: {'; '.join(faults.values())}.")
    return engines, faults


def _measure(
    engines: Mapping[str, EngineProcess],
    tasks: Sequence[Task],
    rounds: int,
    patience: float,
    progress: Console,
) -> dict[str, list[Pair]]:
    def measure(side: str, task: Task) -> Measurement:
        return Measurement(**engines[side].ask(task.do, **task.arguments))

    def notify(number: int, task: Task) -> None:
        progress.print(f"bench model: round {number} of {rounds}, {task.name}")

    for side in engines:  # first runs of a shape allocate, and oneDNN builds its kernels
        for task in tasks:
            measure(side, task)
    deadline = time.monotonic() + patience
    return take_rounds(
        tasks,
        list(engines),
        rounds,
        measure,
        random.Random(rounds),
        patient=lambda: time.monotonic() < deadline,
        notify=notify,
    )


def _profile(engine: EngineProcess, progress: Console) -> dict[str, Any]:
    progress.print(f"bench model: profiling {engine.side}")
    decode = {"context": DECODE_CONTEXT, "outputs": 17}
    return {
        "prefill_2048": engine.ask("profile", task="prefill", tokens=2048),
        "decode_b1": engine.ask("profile", task="decode", batch=1, **decode),
        "decode_b8": engine.ask("profile", task="decode", batch=8, **decode),
    }


def _report(
    tasks: Sequence[Task],
    rounds: int,
    pairs: Mapping[str, Sequence[Pair]],
    faults: Mapping[str, str],
    engines: Mapping[str, EngineProcess],
    profiles: Mapping[str, Any],
) -> Report:
    return Report(
        name="model",
        settings={
            "engine": sizes.ENGINE,
            "models": {OURS: sizes.v41_options().model_dump(mode="json"), REPAIRED: sizes.v4_config()},
            "tasks": {task.name: dict[str, JsonValue](task.arguments) for task in tasks},
            "engines": {side: dict(engine.state) for side, engine in engines.items()},
        },
        rounds=rounds,
        figures=figures(pairs, faults),
        series={"rounds": {name: summary(taken) for name, taken in pairs.items()}, "profile": dict(profiles)},
    )


def _warn_of_neighbours(pairs: Mapping[str, Sequence[Pair]], progress: Console) -> None:
    every = [pair for taken in pairs.values() for pair in taken]
    if count := disturbed(every):
        progress.print(
            f"bench model: other processes used the cores during {count} of {len(every)} measurements, and "
            "the figures suffer: run it on a quiet machine, or read fastest_step_ms in the report"
        )


def figures(pairs: Mapping[str, Sequence[Pair]], faults: Mapping[str, str]) -> tuple[Figure, ...]:
    """The figures that the issue names, then each side's tokens/s; `faults` says which side has none."""
    ratios = [_ratio(name, taken, faults) for name, taken in pairs.items()]
    speeds = [_speed(name, side, taken, faults) for name, taken in pairs.items() for side in SIDES]
    missing = [Figure.missing(name, "s", reason) for name, reason in NOT_MEASURED.items()]
    return (*ratios, *missing, *speeds)


def _ratio(task: str, pairs: Sequence[Pair], faults: Mapping[str, str]) -> Figure:
    """`decode_b1` gives `decode_ratio_b1`: the median over the rounds of ours over theirs."""
    what, size = task.split("_")
    name, target = f"{what}_ratio_{size}", ">= 1.0"
    if faults:
        return Figure.missing(name, "ratio", "; ".join(faults.values()), target)
    return Figure.measured(name, [pair.ratio(OURS, REPAIRED) for pair in pairs], "ratio", target)


def _speed(task: str, side: str, pairs: Sequence[Pair], faults: Mapping[str, str]) -> Figure:
    name = f"{task}_{side}"
    if side in faults:
        return Figure.missing(name, "tokens/s", faults[side])
    return Figure.measured(name, rates(pairs, side), "tokens/s")
