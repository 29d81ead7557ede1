"""One model's engine process: `python -m vllm_deepinfer_plugins.scheduler.bench.worker MODEL FOLDER`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TextIO

from vllm_deepinfer.bench.scheduler.traffic import Mix

from ...bench import protocol
from ...bench.worker import _end_with, _take_stdout
from . import models


def commands(driver: Any) -> Mapping[str, protocol.Command]:
    """What the benchmark may ask."""

    def closed(
        setting: dict[str, Any], mix: list[Any], seed: int, decodes: int, seconds: float, warm_up: float
    ) -> dict[str, Any]:
        return driver.closed(setting, Mix(*mix).lengths(seed), decodes, seconds, warm_up).summary()

    def opened(setting: dict[str, Any], arrivals: list[list[Any]], decodes: int) -> dict[str, Any]:
        return driver.opened(setting, [(due, length) for due, length in arrivals], decodes).summary()

    def changing(
        setting: dict[str, Any], mixes: list[list[Any]], seed: int, decodes: int, seconds: float
    ) -> list[dict[str, Any]]:
        """The mixes one after another on one scheduler, which is what has to adapt."""
        parts = [driver.closed(setting, Mix(*m).lengths(seed), decodes, seconds, 0.3) for m in mixes]
        return [part.summary() for part in parts]

    def schedule_times(setting: dict[str, Any], running: int, waiting: int, steps: int) -> list[float]:
        return driver.schedule_times(setting, running, waiting, steps)

    def learned() -> dict[str, Any]:
        learner = driver.learner
        if learner is None or learner.error is None:
            return {}
        return {"cost": asdict(learner.cost()), "refits": learner.refits, "errors": list(learner._errors)}

    return {
        "closed": closed,
        "opened": opened,
        "changing": changing,
        "schedule_times": schedule_times,
        "learned": learned,
    }


def start(name: str, folder: str) -> tuple[Any, dict[str, Any]]:
    """The driver, and what the report says about the engine."""
    import torch
    from vllm import LLM

    from .driver import Driver

    llm = LLM(model=folder, **models.engine_settings(name))
    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    return Driver(llm, vocabulary), {"threads": torch.get_num_threads(), "vocabulary": vocabulary}


def main(arguments: list[str], requests: TextIO, replies: TextIO) -> None:
    """Start, say so, answer until the other side closes."""
    try:
        driver, state = start(*arguments)
    except Exception as error:
        protocol.send(replies, {"error": f"{type(error).__name__}: {error}"})
        raise
    protocol.send(replies, {"ok": state})
    protocol.serve(commands(driver), requests, replies)


if __name__ == "__main__":
    _end_with(os.getppid())
    main(sys.argv[1:], sys.stdin, _take_stdout())
