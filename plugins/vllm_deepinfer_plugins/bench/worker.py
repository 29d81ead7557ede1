"""One engine's process: `python -m vllm_deepinfer_plugins.bench.worker SIDE MODEL`, driven over its pipes.

One process per side, because the repair of vLLM's V4 class must not touch ours, and because vLLM on CPU keeps
one engine per process. The benchmark starts both and lets one work at a time.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TextIO

from . import protocol
from .sizes import ENGINE, VOCAB
from .workload import Measurement, Workload

OURS, REPAIRED = "ours", "vllm_v4"
SIDES = (OURS, REPAIRED)


def start(side: str, model: str) -> tuple[Workload, dict[str, Any]]:
    """Start the engine of one side on the checkpoint folder `model`, and say how it stands."""
    begin = time.perf_counter()
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise RuntimeError(
            f"the benchmark compares CPU classes, and vLLM runs on {current_platform.device_name} here"
        )
    load_format = "auto"
    if side == REPAIRED:
        from . import random_weights, v4_repair

        v4_repair.apply()
        random_weights.register()
        load_format = random_weights.LOAD_FORMAT
    from vllm import LLM

    engine = LLM(model=model, load_format=load_format, **ENGINE).llm_engine
    state = {"start_seconds": round(time.perf_counter() - begin, 2), **_threads(), **_model(engine)}
    return Workload(engine, VOCAB), state


def commands(workload: Workload) -> Mapping[str, protocol.Command]:
    """What the benchmark may ask of an engine."""
    from .profiling import profiled

    def prefill(tokens: int) -> dict[str, Any]:
        return asdict(workload.prefill(tokens))

    def decode(batch: int, context: int, outputs: int) -> dict[str, Any]:
        return asdict(workload.decode(batch, context, outputs))

    def profile(task: str, **arguments: int) -> dict[str, Any]:
        run: dict[str, Any] = {"prefill": workload.prefill, "decode": workload.decode}

        def measure(timed: Any) -> Measurement:
            return run[task](**arguments, timed=timed)

        return profiled(measure)

    return {"prefill": prefill, "decode": decode, "profile": profile, "check": workload.check}


def _threads() -> dict[str, int]:
    import torch

    return {"threads": torch.get_num_threads()}


def _model(engine: Any) -> dict[str, Any]:
    model = engine.model_executor.driver_worker.get_model()
    return {"model_class": f"{type(model).__module__}.{type(model).__qualname__}"}


def main(side: str, model: str) -> int:
    """Serve until the benchmark closes stdin."""
    _end_with(os.getppid())
    replies = _take_stdout()
    try:
        workload, state = start(side, model)
    except Exception as error:
        protocol.send(replies, {"error": f"{type(error).__name__}: {error}"})
        raise
    protocol.send(replies, {"ok": state})
    protocol.serve(commands(workload), sys.stdin, replies)
    return 0


def _end_with(parent: int, seconds: float = 1.0) -> None:
    """End this process soon after `parent` has died: a killed benchmark must not leave an engine at work."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(seconds)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _take_stdout() -> TextIO:
    """Keep stdout for replies: whatever else prints there, such as vLLM's log, goes to stderr from now on."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
