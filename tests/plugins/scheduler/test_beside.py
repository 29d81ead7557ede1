"""The scheduler beside what needs its own engine: preemption, grammars, connectors, V4.1, speculation."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.scheduler.harness import TARGET_MS, Arrival, Served, serve, tiny, traffic, use_model_clock

pytestmark = pytest.mark.slow


def both(llm: Any, arrivals: list[Arrival], **deepinfer: Any) -> tuple[Served, Served]:
    """Stock's scheduler and ours in turn on one engine."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm_deepinfer_plugins.scheduler import TimeBudgetScheduler
    from vllm_deepinfer_plugins.scheduler.bench.swap import swap

    core = llm.llm_engine.engine_core.engine_core
    swap(core, Scheduler, deepinfer=deepinfer)
    expected = serve(llm, arrivals)
    with tempfile.TemporaryDirectory() as folder:
        ours = {"itl_target_ms": TARGET_MS, "step_cost_file": f"{folder}/fit.json", **deepinfer}
        use_model_clock(swap(core, TimeBudgetScheduler, deepinfer=ours))
        return expected, serve(llm, arrivals)


def within_budget(served: Served, least: int = 5) -> None:
    limited = [r for r in served.records if r.decodes and r.chunks]
    assert len(limited) >= least
    assert all(r.predicted <= r.budget * (1 + 1e-9) for r in limited)


def test_preemption(tmp_path: Path) -> None:
    """KV for a few requests at a time: both preempt, and both come to the same answers."""
    arrivals = traffic(29, count=20, longest=300, most=120, spacing=1)
    with tiny(tmp_path, num_gpu_blocks_override=40, block_size=32, enable_prefix_caching=False) as llm:
        expected, found = both(llm, arrivals)
    assert found.answers == expected.answers
    assert expected.preemptions > 0 and found.preemptions > 0


def test_structured_output(tmp_path: Path) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    grammar = {"structured_outputs": StructuredOutputsParams(regex=r"[a-c]{4,8}")}
    arrivals = [replace(a, extra=grammar if n % 2 else {}, tokens=12) for n, a in enumerate(traffic(37, 12))]
    with tiny(tmp_path) as llm:
        expected, found = both(llm, arrivals)
    assert found.answers == expected.answers
    for number, answer in enumerate(found.answers):
        if number % 2:
            assert all(token - 20 in b"abc" or token == 1 for token in answer[:4])
    within_budget(found)


def test_asynchronous_loads(tmp_path: Path) -> None:
    transfer = {
        "kv_connector": "SlowConnector",
        "kv_connector_module_path": "tests.plugins.scheduler.fake_connector",
        "kv_role": "kv_both",
    }
    arrivals = traffic(41, count=16)
    with tiny(tmp_path, kv_transfer_config=transfer, enable_prefix_caching=False, block_size=32) as llm:
        expected, found = both(llm, arrivals)
    assert found.answers == expected.answers
    assert found.cached == expected.cached == 128 * sum(len(a.prompt) > 128 for a in arrivals)
    within_budget(found)


def test_deepseek_v41(tmp_path: Path) -> None:
    """Batch-invariant, so that every token must be the same whatever the chunks are."""
    from tests.plugins.model.engines import checkpoint, engine, prompts

    lengths = [700, 30, 1500, 260, 5, 900, 64, 333]
    arrivals = [Arrival(2 * i, p, 6 + i) for i, p in enumerate(prompts(lengths))]
    path = checkpoint("deepseek-v4.1-tiny", tmp_path)
    with engine(path, invariant=True, max_num_seqs=8) as llm:
        expected, found = both(llm, arrivals, batch_invariant=True)
        config = json.loads((path / "config.json").read_text())["text_config"]
        bound = llm.llm_engine.engine_core.engine_core.scheduler._keeper
        assert bound is not None and config["index_topk"] > 0
    assert found.answers == expected.answers
    assert found.steps != expected.steps
    within_budget(found)


def test_speculation(tmp_path: Path) -> None:
    """In a process of its own: after it, vLLM 0.32's kernel dispatcher cannot start another engine."""
    command = [sys.executable, "-m", "tests.plugins.scheduler.speculation", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["ours"] == said["stock"] and len(said["ours"]) == 12
    assert said["steps_with_drafts"] > 10
    assert said["limited"] >= 5 and said["over"] == 0
