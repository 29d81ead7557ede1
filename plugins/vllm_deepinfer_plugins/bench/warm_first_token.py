"""First token of a 16k-token prompt, cold and with its prefix in the store alone: a part of `bench store`.

    python -m vllm_deepinfer_plugins.bench.warm_first_token FOLDER ROUNDS OUT.json

One engine in this process, V4.1 in the sizes of `bench model`. A round takes a new prompt: cold, it is
computed and saved; then the engine's own prefix cache is emptied, and the same prompt with 64 more tokens
comes again.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 16_384
SUFFIX_TOKENS = 64
CONTEXT = PROMPT_TOKENS + 512
_SAVED_WITHIN_S = 60.0


def main(folder: str, rounds: str, out: str) -> None:
    """Measure and write `[{"cold", "warm", "loaded_tokens"}, …]`, seconds."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    checkpoint, store = Path(folder) / "checkpoint", Path(folder) / "kv"
    _write(checkpoint)
    llm = _engine(checkpoint, store)
    rng, found = random.Random(0), []
    _first_token(llm, _tokens(rng, 2_048))  # what a first step costs only once
    for _ in range(int(rounds)):
        prompt = _tokens(rng, PROMPT_TOKENS)
        cold, _ = _first_token(llm, prompt)
        _settle(llm)
        if not llm.reset_prefix_cache():
            raise RuntimeError("the engine's prefix cache could not be emptied")
        warm, loaded = _first_token(llm, prompt + _tokens(rng, SUFFIX_TOKENS))
        if not loaded:
            raise RuntimeError("the store had nothing of a prompt that was just saved")
        found.append({"cold": cold, "warm": warm, "loaded_tokens": loaded})
    Path(out).write_text(json.dumps(found))
    llm.llm_engine.engine_core.shutdown()


def _write(checkpoint: Path) -> None:
    from vllm_deepinfer.checkpoint.tiny import write_checkpoint

    from .sizes import v41_options

    write_checkpoint(checkpoint, v41_options().model_copy(update={"context_length": 32_768}))


def _engine(checkpoint: Path, store: Path) -> Any:
    from vllm import LLM

    from .sizes import ENGINE

    settings = {
        **ENGINE,
        "max_model_len": CONTEXT,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "kv_transfer_config": {
            "kv_connector": "PrefixStoreConnector",
            "kv_connector_module_path": "vllm_deepinfer_plugins.kv_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"store": str(store)},
        },
    }
    return LLM(str(checkpoint), **settings)


def _first_token(llm: Any, prompt: list[int]) -> tuple[float, int]:
    """Seconds until one token was generated, and tokens of the prompt that were not computed."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    return time.perf_counter() - start, int(output.num_cached_tokens or 0)


def _settle(llm: Any) -> None:
    """Step the engine until no save holds blocks."""
    core = llm.llm_engine.engine_core.engine_core
    end = time.monotonic() + _SAVED_WITHIN_S
    while core.scheduler.connector.has_pending_push_work():
        if time.monotonic() > end:
            raise RuntimeError(f"saves had not ended after {_SAVED_WITHIN_S:g} s")
        core.step()


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(300, 4_000) for _ in range(count)]


if __name__ == "__main__":
    main(*sys.argv[1:])
