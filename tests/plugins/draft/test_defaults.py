"""An engine with the drafter and no other setting: both replays run, and `/metrics` shows what they did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm_deepinfer_plugins.draft.worker import DraftRunner
from vllm_deepinfer_plugins.scheduler.stat_logger import StepLogger
from vllm_deepinfer_plugins.verification.scheduler import VerifyingScheduler

from tests.plugins.model import engines
from tests.plugins.replay.oracle import BLOCK, ENGINES, SPECULATION, checkpoint, scheduler_of
from tests.plugins.replay.test_engine import DOCUMENT, WINDOW, answer, ids, serve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ENGINES, reason="an engine of its own: set DEEPINFER_REPLAY_ENGINES=1"),
]


@pytest.mark.parametrize(("dtype", "index"), [("bfloat16", 78), ("float32", 79)])
def test_without_any_setting(tmp_path: Path, dtype: str, index: int) -> None:
    """In bfloat16 with the native kernels."""
    given: dict[str, Any] = {"block_size": BLOCK, "additional_config": {}, "dtype": dtype}
    given["speculative_config"] = SPECULATION
    with engines.engine(checkpoint(tmp_path, blocks=2), **given) as llm:
        scheduler, engine = scheduler_of(llm), str(index)
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        assert isinstance(scheduler, VerifyingScheduler) and isinstance(runner, DraftRunner)
        assert scheduler.prefix_replay_tokens == WINDOW and scheduler._windows._on
        logger = StepLogger(llm.llm_engine.vllm_config, engine_index=index)
        serve(llm, {"document": [*DOCUMENT, 20]}, tokens=1)
        serve(llm, {"hit": DOCUMENT[:64] + ids(9, seed=8)})
        whole = DOCUMENT + answer(serve(llm, {"turn": DOCUMENT}, tokens=40)["turn"])
        serve(llm, {"next": whole[:144] + ids(9, seed=5)})
        serve(llm, {"short": DOCUMENT[:WINDOW] + ids(5, seed=1)})
        logger.record(scheduler.make_stats(), None)
    for name in ("replayed_tokens", "declined_hits", "restored_windows", "kept_windows", "trimmed_rows"):
        assert value(f"replay_{name}_total", engine=engine) > 0, name
    assert value("verification_drafted_total", engine=engine, position="4") > 20
    assert value("verification_verified_total", engine=engine, position="0") > 20


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"deepinfer_{name}", labels) or 0.0
