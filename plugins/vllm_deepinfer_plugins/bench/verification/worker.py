"""One engine's process: `python -m ...bench.verification.worker DRAFTER MODEL OUTPUTS`, driven by pipes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_deepinfer.policy.calibration_errors import Errors, Records

from ...verification.calibrate.command import judged
from ...verification.calibrate.recorder import joined
from .. import protocol
from ..worker import _end_with, _take_stdout
from . import optimum
from .driver import Driver
from .plan import ADAPTIVE, BATCH_SLOPE, BATCHES, CONTEXT, DRAFTS, SCRIPTED, engine
from .script import Confidences, Scripts
from .traffic import Lessons, numbered

FEWEST = 8  # lessons of a slice: one answer is too short to be timed
ENDLESS = CONTEXT - 64  # tokens: more than a slice ever sees


class Bench:
    """What the benchmark may ask."""

    def __init__(self, driver: Driver, vocabulary: int, lessons: Lessons | None, outputs: int) -> None:
        self._driver, self._vocabulary, self._lessons, self._outputs = driver, vocabulary, lessons, outputs
        self._prompts: dict[tuple[str, int, int], list[list[int]]] = {}

    def measure(
        self, setting: str, traffic: str, concurrency: int, seed: int, steps: int, seconds: float
    ) -> dict[str, Any]:
        """A slice; equal traffic, concurrency and seed: the same requests."""
        key = (traffic, concurrency, seed)
        if self._lessons is None:
            seen = self._driver.measure(
                setting,
                numbered(concurrency, self._vocabulary, seed),
                scripts=Scripts.of(traffic, concurrency, seed),
                outputs=ENDLESS,
                steps=steps,
                seconds=seconds,
            )
        else:
            if key not in self._prompts:
                self._prompts = {key: self._lessons.prompts(traffic, max(concurrency, FEWEST))}
            seen = self._driver.measure(
                setting, self._prompts[key], outputs=self._outputs, at_once=concurrency
            )
        return {"rate": seen.rate, "foreign": seen.foreign, "steps": seen.steps, "drafts": seen.drafts}

    def optimum(self, batch: int, steps: int) -> dict[str, Any]:
        """Adaptive verification of a small batch over the best choice by brute force."""
        levels = BATCHES[batch]
        prompts = numbered(len(levels), self._vocabulary, batch)

        def trace(setting: str, seed: int) -> optimum.Trace:
            scripts = Scripts.steady(levels, BATCH_SLOPE, seed)
            return self._driver.measure(
                setting, prompts, scripts=scripts, outputs=ENDLESS, steps=steps, trace=True
            ).trace

        pinned = [f"pinned {slots}" for slots in range(DRAFTS * len(levels) + 1)]
        for seed in range(3):  # small batches are what this one has to know
            trace(ADAPTIVE, seed)
        traces: list[optimum.Trace] = []
        ours: list[tuple[float, Sequence[int]]] = []
        for seed in range(2):
            traces += [trace(setting, 10 + seed) for setting in pinned]
            ours += trace(ADAPTIVE, 10 + seed)
        seconds = optimum.costs([*traces, ours])
        scripts = Scripts.steady(levels, BATCH_SLOPE, 0)
        survived = scripts.survivals(np.arange(len(levels)), np.zeros(len(levels), np.int64), DRAFTS)
        rate, lengths = optimum.best(survived, seconds)
        return {
            "ratio": optimum.over_best(survived, seconds, ours),
            "best": list(lengths),
            "best_rate": rate,
            "step_ms": {str(slots): round(1e3 * each, 3) for slots, each in seconds.items()},
            "chosen": _often([tuple(lengths) for _, lengths in ours]),
        }

    def calibrated(self, rounds: int) -> dict[str, Any]:
        """ECE of survival before and after a calibration, on requests that it was not fitted to."""
        concurrency, traffic = 64, "mixed"
        steps = 0
        parts: list[tuple[list[str], Records]] = []
        while steps * concurrency < rounds:
            if self._lessons is None:
                scripts = Scripts.of(traffic, concurrency, steps)
                seen = self._driver.measure(
                    "record",
                    numbered(concurrency, self._vocabulary, steps),
                    scripts=scripts,
                    confidences=Confidences.TOO_SURE,
                    outputs=ENDLESS,
                    steps=40,
                )
            else:
                prompts = self._lessons.prompts(traffic, concurrency)
                seen = self._driver.measure("record", prompts, outputs=self._outputs)
            recorder = self._driver.minds.recorder
            assert recorder is not None
            parts.append(recorder.records())
            steps += seen.steps
        keys, records = joined(parts)
        found = judged(keys, records)
        return {
            "before": _survival(found.before),
            "after": _survival(found.after),
            "temperatures": list(found.calibration.temperatures),
            "rounds": len(keys),
        }


def _often(choices: list[tuple[int, ...]]) -> dict[str, int]:
    return {str(list(choice)): choices.count(choice) for choice in sorted(set(choices))}


def _survival(errors: Errors) -> dict[str, float]:
    """By position from 1 on; 0: the mean."""
    return {"0": errors.mean_survival} | {str(k): each for k, each in enumerate(errors.survival, 1)}


def main(drafter: str, model: str, outputs: str) -> int:
    """Serve until the benchmark closes stdin."""
    _end_with(os.getppid())
    replies = _take_stdout()
    try:
        from vllm import LLM

        llm = LLM(model, **engine(drafter))
        vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
        lessons = None if drafter == SCRIPTED else Lessons(Path(model))
        bench = Bench(Driver(llm.llm_engine), vocabulary, lessons, int(outputs))
    except Exception as error:
        protocol.send(replies, {"error": f"{type(error).__name__}: {error}"})
        raise
    protocol.send(replies, {"ok": {"vocabulary": vocabulary}})
    commands: Mapping[str, protocol.Command] = {
        "measure": bench.measure,
        "optimum": bench.optimum,
        "calibrated": bench.calibrated,
    }
    protocol.serve(commands, sys.stdin, replies)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
