"""An engine that nobody gave a setting: both replays run, and what they did reaches `/metrics`."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm_deepinfer_plugins.replay.metrics import SERIES
from vllm_deepinfer_plugins.replay.scheduler import ReplayScheduler
from vllm_deepinfer_plugins.replay.worker import ReplayRunner
from vllm_deepinfer_plugins.scheduler.stat_logger import StepLogger

from tests.plugins.model import engines

from .oracle import BLOCK, checkpoint, scheduler_of
from .test_engine import DOCUMENT, WINDOW, answer, ids, serve

pytestmark = pytest.mark.slow
ROWS = WINDOW + 2


def test_without_any_setting(tmp_path: Path) -> None:
    with engines.engine(checkpoint(tmp_path), block_size=BLOCK, additional_config={}) as llm:
        scheduler = scheduler_of(llm)
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        assert isinstance(scheduler, ReplayScheduler) and isinstance(runner, ReplayRunner)
        assert scheduler.prefix_replay_tokens == WINDOW and scheduler._windows._on
        logger = StepLogger(llm.llm_engine.vllm_config, engine_index=77)
        serve(llm, {"document": [*DOCUMENT, 20]}, tokens=1)
        serve(llm, {"hit": DOCUMENT[:64] + ids(9, seed=8)})
        whole = DOCUMENT + answer(serve(llm, {"turn": DOCUMENT}, tokens=40)["turn"])
        before = scheduler._ledger.counts.restored_windows
        serve(llm, {"next": whole[:144] + ids(9, seed=5)})
        serve(llm, {"short": DOCUMENT[:WINDOW] + ids(5, seed=1)})
        counts = scheduler._ledger.counts
        assert counts.restored_windows == before + 1 and counts.declined_hits == 1
        assert counts.replayed_tokens >= WINDOW and counts.replayed_tokens % WINDOW == 0
        assert counts.trimmed_rows > len(DOCUMENT) - ROWS
        logger.record(scheduler.make_stats(), None)
    page = generate_latest(REGISTRY).decode()
    for metric, _ in SERIES.values():
        assert f'deepinfer_replay_{metric}_total{{engine="77"}}' in page
    assert f'replayed_tokens_total{{engine="77"}} {float(counts.replayed_tokens)}' in page
