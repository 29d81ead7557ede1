"""A seed on a CPU: an engine that cuts prompts survives it, and draws the same whatever the cut."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.model import engines


def test_what_is_overridden_is_still_as_it_was_read() -> None:
    """vLLM 0.32: `_bookkeeping_sync` sets generators of discarded rows back by offset.

    If this fails, look at `GPUModelRunner._sample` and `_bookkeeping_sync` again.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    source = inspect.getsource(GPUModelRunner._bookkeeping_sync)
    assert "gen.set_offset(gen.get_offset() - 4)" in source
    assert "self.discard_request_mask.np[:num_reqs]" in source
    assert "generators.get(int(i))" in source


def test_installing_twice_is_installing_once() -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm_deepinfer_plugins import seeds

    seeds.install()
    first = CPUModelRunner._sample
    seeds.install()
    assert CPUModelRunner._sample is first is seeds._sample


def draws(llm: Any, prompts: list[list[int]]) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = [
        SamplingParams(temperature=1.0, seed=at, max_tokens=8, ignore_eos=True) for at in range(len(prompts))
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.slow
@pytest.mark.long
def test_seeded_requests_in_chunks(tmp_path: Path) -> None:
    path = engines.checkpoint(engines.NAMES[0], tmp_path)
    prompts = engines.prompts([5, 40, 100, 17])
    found = []
    for batched in (4096, 32):
        with engines.engine(path, invariant=True, max_num_batched_tokens=batched) as llm:
            found.append(draws(llm, prompts))
            assert draws(llm, prompts) == found[-1], "the same seed again"
    assert found[0] == found[1]
