"""The command: three engines on one checkpoint, measured in turn."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from pydantic import JsonValue
from rich.console import Console

from vllm_deepinfer.bench.report import Figure, Report
from vllm_deepinfer.checkpoint.tiny import write_checkpoint
from vllm_deepinfer.errors import UserError

from ..engine_process import EngineFailed, EngineProcess
from ..rounds import Pair, Task, disturbed, take_rounds
from ..workload import Measurement
from .sizes import ENGINE, KEPT, OPTIONS, REPLAY, RESTORED, SETTINGS

QUICK_ROUNDS, FULL_ROUNDS = 3, 9
QUICK_PATIENCE, FULL_PATIENCE = 100.0, 1200.0  # seconds of measuring after which disturbed rounds are kept
PREFIX = 16384
SUFFIX = 512  # tokens of a turn behind the warm prefix, as in agents' traffic; series.warm has others
SUFFIXES = (128, 256, SUFFIX)
TARGETS = {
    "prefill_time_ratio_16k": "<= 0.58",
    "prefill_time_ratio_4k": "<= 0.62",
    "warm_ttft_ratio_16k": "<= 1.3",
    "cache_bytes_ratio": "<= 0.15",
}
NO_CHECKPOINT = "random weights predict nothing: `bench quality` has both, of the trained checkpoint"


def run(quick: bool, json: Path | None) -> int:
    """Measure, print the table, write the report."""
    progress = Console(stderr=True)
    rounds = QUICK_ROUNDS if quick else FULL_ROUNDS
    with tempfile.TemporaryDirectory(prefix="bench-replay-") as folder, ExitStack() as stack:
        progress.print("bench replay: writing the checkpoint, 20 + 20 layers")
        model = write_checkpoint(Path(folder) / "model", OPTIONS).folder
        engines = _start(model, stack, progress)
        try:
            caches = {side: engines[side].ask("cache", tokens=PREFIX) for side in (REPLAY, KEPT)}
            pairs = _measure(engines, rounds, QUICK_PATIENCE if quick else FULL_PATIENCE, progress)
            counts = {side: engine.ask("counts") for side, engine in engines.items()}
        except EngineFailed as error:
            raise UserError(f"bench replay: {error}.") from None
    report = Report(
        name="replay",
        settings={
            "engine": ENGINE,
            "sides": {side: dict(setting) for side, setting in SETTINGS.items()},
            "model": OPTIONS.model_dump(mode="json"),
            "warm_prefix": PREFIX,
            "warm_suffix": SUFFIX,
        },
        rounds=rounds,
        figures=tuple(figures(pairs, caches)),
        series={**series(pairs), "cache": caches, "counts": counts},
    )
    report.finish(json)
    if (number := sum(map(disturbed, pairs.values()))) > 0:
        progress.print(f"bench replay: other processes disturbed {number} measurements that were kept")
    return 0


def tasks() -> list[Task]:
    """What is measured, by the stem of its figure."""
    prompts = [Task(f"prefill_{k}k", "prefill", {"tokens": k * 1024}) for k in (1, 4, 16)]
    return prompts + [Task(f"warm_{n}", "warm", {"prefix": PREFIX, "suffix": n}) for n in SUFFIXES]


def _start(model: Path, stack: ExitStack, progress: Console) -> dict[str, EngineProcess]:
    engines = {}
    for side in SETTINGS:
        progress.print(f"bench replay: starting the engine {side!r}")
        command = [sys.executable, "-m", f"{__package__}.worker", side, str(model)]
        engine = stack.enter_context(EngineProcess(side, command))
        try:
            engine.wait_until_up()
            wrong = engine.ask("check")
        except EngineFailed as error:
            raise UserError(f"bench replay: {error}.") from None
        if wrong:
            raise UserError(f"bench replay: engine {side!r} gives wrong answers: {'; '.join(wrong)}.")
        engines[side] = engine
    return engines


def _measure(
    engines: Mapping[str, EngineProcess], rounds: int, patience: float, progress: Console
) -> dict[str, list[Pair]]:
    begin = time.monotonic()

    def measure(side: str, task: Task) -> Measurement:
        return Measurement(**engines[side].ask(task.do, **task.arguments))

    def patient() -> bool:
        return time.monotonic() - begin < patience

    def notify(number: int, task: Task) -> None:
        progress.print(f"bench replay: round {number + 1} of {rounds}, {task.name}")

    rng, pairs = random.Random(0), dict[str, list[Pair]]()
    for sides, chosen in _comparisons():
        pairs |= take_rounds(chosen, sides, rounds, measure, rng, patient, notify)
    return pairs


def _comparisons() -> list[tuple[Sequence[str], list[Task]]]:
    cold = [task for task in tasks() if task.do == "prefill"]
    warm = [task for task in tasks() if task.do == "warm"]
    return [((REPLAY, KEPT), cold), ((REPLAY, KEPT, RESTORED), warm)]


def figures(pairs: Mapping[str, Sequence[Pair]], caches: Mapping[str, Mapping[str, int]]) -> list[Figure]:
    """What the issue names, and the seconds behind it."""
    found = [_ratio(f"prefill_time_ratio_{k}k", pairs[f"prefill_{k}k"], REPLAY, KEPT) for k in (16, 4, 1)]
    found.append(_ratio("warm_ttft_ratio_16k", pairs[f"warm_{SUFFIX}"], REPLAY, KEPT))
    found.append(_ratio("restored_ttft_ratio_16k", pairs[f"warm_{SUFFIX}"], RESTORED, KEPT))
    bytes_ratio = caches[REPLAY]["bytes"] / caches[KEPT]["bytes"]
    found.append(
        Figure(name="cache_bytes_ratio", value=bytes_ratio, unit="ratio", target=TARGETS["cache_bytes_ratio"])
    )
    for name in ("suffix_perplexity_ratio", "decode_perplexity_ratio"):
        found.append(Figure.missing(name, "ratio", NO_CHECKPOINT))
    return found


def _ratio(name: str, pairs: Sequence[Pair], ours: str, other: str) -> Figure:
    """Seconds of ``ours`` over those of ``other``: equal tokens on both sides."""
    return Figure.measured(name, [pair.ratio(other, ours) for pair in pairs], "ratio", TARGETS.get(name))


def series(pairs: Mapping[str, Sequence[Pair]]) -> dict[str, JsonValue]:
    """Every round's seconds, by task and side, and how busy other processes were."""
    rounds: dict[str, JsonValue] = {}
    for name, taken in pairs.items():
        sides: dict[str, JsonValue] = {
            side: [round(pair.sides[side].seconds, 4) for pair in taken] for side in taken[0].sides
        }
        rounds[name] = {"seconds": sides, "foreign_cpu_share": [round(pair.foreign, 4) for pair in taken]}
    return {"rounds": rounds}
