"""Starts VllmEngine for tests, one thread, float32."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

# One thread: at these sizes a second one costs more in barriers than it computes. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


async def started(model: Path, vllm_metrics: bool = False, **args: Any) -> Any:
    """A started VllmEngine; `args` are AsyncEngineArgs."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm_deepinfer_plugins.engine import VllmEngine

    defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 64}
    engine = VllmEngine(AsyncEngineArgs(model=str(model), **{**defaults, **args}), vllm_metrics=vllm_metrics)
    await engine.start()
    return engine
