"""Real engines on one store: different hash seeds, both ways, exactly the tokens of one engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]

SCRIPT = """
import json, os, sys
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", OMP_NUM_THREADS="1",
                  VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
model, store, groups, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
from vllm import LLM, SamplingParams
if store != "none":
    settings["kv_transfer_config"] = {
        "kv_connector": "PrefixStoreConnector",
        "kv_connector_module_path": "vllm_deepinfer_plugins.kv_connector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": store, "run_tokens": 128, "admission": "always"}}
llm = LLM(model, dtype="float32", enforce_eager=True, disable_log_stats=False, max_num_batched_tokens=512,
          **settings)
core, found = llm.llm_engine.engine_core.engine_core, []
sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
for prompts in groups:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    found += [[int(o.num_cached_tokens), list(o.outputs[0].token_ids)] for o in outputs]
    while core.scheduler.connector is not None and core.scheduler.connector.has_pending_push_work():
        core.step()
free = core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
llm.llm_engine.engine_core.shutdown()
print("RESULT" + json.dumps([found, free]))
"""


def engine(
    model: Path, store: str, groups: list[list[list[int]]], seed: str, **settings: Any
) -> tuple[list[tuple[int, list[int]]], int]:
    """Cached tokens and answer of each prompt, in a process of its own; blocks that are free at the end."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), store, json.dumps(groups), json.dumps(settings)],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if "RESULT" in line]
    assert lines, done.stderr[-2_000:]
    found, free = json.loads(lines[0].partition("RESULT")[2])
    return [(cached, answer) for cached, answer in found], free


def tokens(seed: int, count: int, low: int = 20, high: int = 270) -> list[int]:
    return [low + (seed * 7_919 + i * i * 31 + i * 17) % (high - low) for i in range(count)]


def dense(folder: Path) -> tuple[Path, dict[str, Any]]:
    from tests.plugins import tiny_qwen3

    before, tiny_qwen3.MAX_MODEL_LEN = tiny_qwen3.MAX_MODEL_LEN, 1_024
    try:
        return tiny_qwen3.write_tiny_qwen3(folder / "qwen3"), {"max_model_len": 1_024, "block_size": 32}
    finally:
        tiny_qwen3.MAX_MODEL_LEN = before


def v41(folder: Path) -> tuple[Path, dict[str, Any]]:
    from tests.plugins.model.engines import NAMES, checkpoint

    exact = {"batch_invariant": True, "encoder_replay": False, "decoder_replay": False}
    return checkpoint(NAMES[0], folder), {"max_model_len": 1_024, "additional_config": {"deepinfer": exact}}


@pytest.mark.parametrize("make", [dense, v41])
def test_two_engines_share_both_ways_and_answer_as_one(make: Any, tmp_path: Path) -> None:
    model, settings = make(tmp_path)
    first, second = tokens(1, 400), tokens(2, 300)
    store = str(tmp_path / "kv")
    alone, free = engine(model, "none", [[first, second, first[:200]]], "0", **settings)
    one, free_one = engine(model, store, [[first]], "1", **settings)
    two, free_two = engine(model, store, [[first, second]], "2", **settings)
    back, _ = engine(model, store, [[second, first[:200]]], "3", **settings)
    answers = [answer for _, answer in alone]
    assert [answer for _, answer in one + two + back] == [answers[i] for i in (0, 0, 1, 1, 2)]
    assert [cached for cached, _ in one + two + back] == [0, 384, 0, 256, 128]
    assert free == free_one == free_two, "no block is held when all is done"
